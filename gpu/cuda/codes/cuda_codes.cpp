#include "gpu/cuda/codes/cuda_codes.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "gpu/codes_layout.h"
#include "gpu/cuda/codes/codes_kernels.h"
#include "gpu/cuda/codes/codes_variants.h"
#include "gpu/cuda/codes/encode.h"
#include "gpu/cuda/codes/encode_copied.h"
#include "gpu/cuda/codes/row_exchange.h"
#include "gpu/cuda/common/device_scope.h"
#include "gpu/cuda/common/memory.h"
#include "gpu/cuda/common/paged_memory.h"
#include "gpu/cuda/common/session_memory.h"
#include "gpu/cuda/common/stream.h"

namespace keyhole::gpu {
namespace {

[[noreturn]] void refuse(const std::string& text) {
  throw Error(Status::invalid_argument, "codes on a CUDA device: " + text);
}

const CodesShape& with_kernels(const CodesShape& shape) {
  if (const std::string why = why_no_codes(shape); !why.empty()) {
    throw Error(Status::unsupported, "codes on a CUDA device: " + why);
  }
  return shape;
}

constexpr uint32_t kNoSlot = ~0U;

}  // namespace

struct CudaCodes::Impl {
  struct Layer {
    KvView rows;              ///< see Codes::set_rows()
    uint32_t count = 0;       ///< blocks, after all that was enqueued
    uint32_t slot = kNoSlot;  ///< its place among the layers that there is memory for
    /// The same pointer in all copies that have the first `shared` blocks in common; null: there are no such copies.
    std::shared_ptr<const char> family;
    uint32_t shared = 0;
    bool is_used = false;  ///< something was enqueued that reads its balance
  };

  Impl(const CodesShape& wanted, int device, const RowWaits& row_waits, uint32_t resident)
      : shape(with_kernels(wanted)),
        layout(wanted),
        ordinal(device),
        waits(row_waits),
        layers(wanted.layers) {
    const DeviceScope scope(ordinal);
    const BesideCapture beside;
    variants = CodesVariants(shape, layout, ordinal, resident);
    int major = 0;
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal),
          "the device's limits");
    ahead = major >= 9;
    memory = DeviceBuffer(layout.others_bytes);
    memory.clear();  // counts are 0
    coded = std::make_unique<PagedMemory>(layout.blocks_bytes);
    if (!shape.blocks_later) coded->own(0, layout.blocks_bytes);
    if (shape.sinks != nullptr) {
      check(
          cudaMemcpy(memory.data() + layout.sinks, shape.sinks,
                     size_t{shape.layers} * shape.q_heads * sizeof(float), cudaMemcpyHostToDevice),
          "copying learned sinks to the device");
    }
    encoder = std::make_unique<EncodeLauncher>(shape.code, shape.dtype);
    if (shape.rows_by_host) {
      exchange = std::make_unique<RowExchange>(shape, memory.as<uint32_t>(layout.row_steps));
    }
    own = std::make_unique<OwnStream>();
    changed = std::make_unique<Event>();
    if (shape.coded_layers != 0) return;
    while (slots < shape.layers) layers[slots].slot = slots, ++slots;
  }
  ~Impl() { (void)cudaEventSynchronize(changed->get()); }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  [[nodiscard]] uint32_t group() const { return shape.q_heads / shape.kv_heads; }
  [[nodiscard]] uint32_t capacity() const { return std::max(shape.blocks, 1U); }

  void check_layer(uint32_t layer) const {
    if (layer >= shape.layers) {
      refuse("layer " + std::to_string(layer) + " of " + std::to_string(shape.layers));
    }
  }
  const Layer& layer_at(uint32_t layer) const {
    check_layer(layer);
    if (layers[layer].slot == kNoSlot) {
      refuse("layer " + std::to_string(layer) + ", which was not named to set_rows()");
    }
    return layers[layer];
  }
  Layer& layer_at(uint32_t layer) {
    return const_cast<Layer&>(std::as_const(*this).layer_at(layer));
  }
  /// Gives the layer a slot of memory where it has none, and returns it.
  Layer& name_layer(uint32_t layer) {
    check_layer(layer);
    Layer& l = layers[layer];
    if (l.slot == kNoSlot && slots == coded_layers(shape)) {
      refuse("layer " + std::to_string(layer) + " beside " + std::to_string(slots) +
             " others, for which there is memory");
    }
    if (l.slot == kNoSlot) l.slot = slots++;
    return l;
  }
  void check_head(uint32_t kv_head) const {
    if (kv_head >= shape.kv_heads) {
      refuse("KV head " + std::to_string(kv_head) + " of " + std::to_string(shape.kv_heads));
    }
  }

  [[nodiscard]] std::byte* blocks(uint32_t layer) const {
    return coded->data() + layers[layer].slot * layout.layer_stride;
  }
  [[nodiscard]] float* key_scales(uint32_t layer) const {
    return memory.as<float>(layout.key_scales) +
           size_t{layers[layer].slot} * shape.kv_heads * shape.code.dim;
  }
  [[nodiscard]] float* value_scales(uint32_t layer) const {
    return memory.as<float>(layout.value_scales) + size_t{layers[layer].slot} * shape.kv_heads;
  }
  /// The device's copy; null where rows are not int8.
  [[nodiscard]] uint16_t* row_scales(uint32_t layer) const {
    if (shape.dtype != DType::i8) return nullptr;
    return memory.as<uint16_t>(layout.row_scales) +
           size_t{layers[layer].slot} * capacity() * shape.kv_heads * 2 * shape.code.dim;
  }
  [[nodiscard]] uint32_t* device_count(uint32_t layer) const {
    return memory.as<uint32_t>(layout.counts) + 2 * layers[layer].slot;
  }
  [[nodiscard]] CodeFigures* figures(uint32_t layer) const {
    return memory.as<CodeFigures>(layout.figures) + size_t{layers[layer].slot} * shape.kv_heads;
  }
  /// The device's copy of Layer::shared.
  [[nodiscard]] uint32_t* device_shared(uint32_t layer) const { return device_count(layer) + 1; }

  [[nodiscard]] DoubtLayout doubt_layout() const {
    return {shape.kv_heads, size_t{group()} * most_step_tokens(group()), shape.code.dim};
  }
  /// Bytes from the rows of a head to those of the next: kernels and copies move rows as bytes.
  [[nodiscard]] size_t head_bytes(uint32_t layer) const {
    return layers[layer].rows.keys.head_stride * dtype_size(shape.dtype);
  }
  [[nodiscard]] CodesStep step(uint32_t layer, const TensorView& q, uint32_t tokens) const {
    (void)layer_at(layer);
    CodesStep s = variants.of(tokens);
    s.block_count = device_count(layer);
    s.family = layers[layer].family.get();
    s.family_count = device_shared(layer);
    s.blocks = blocks(layer);
    s.key_scale = key_scales(layer);
    s.value_scale = value_scales(layer);
    s.q = q;
    s.keys = layers[layer].rows.keys.data;
    s.values = layers[layer].rows.values.data;
    s.kv_head_stride = head_bytes(layer);
    s.row_scales = row_scales(layer);
    s.logits = shape.logits_of(layer);
    if (shape.sinks != nullptr) {
      s.sinks = memory.as<float>(layout.sinks) + size_t{layer} * shape.q_heads;
    }
    if (exchange != nullptr) {
      s.host_rows = exchange->params(layer, waits);
      s.keys = s.values = nullptr;  // the device does not know where they lie
    }
    if (shape.asks_doubt) {
      s.doubt = doubt_in(memory.data() + layout.doubt, doubt_layout(), figures(layer));
    }
    s.work = memory.data() + layout.work;
    return s;
  }

  /// Enqueues that the layer has these blocks in common with its family.
  void set_family(uint32_t layer, const std::shared_ptr<const char>& family, uint32_t shared,
                  Stream stream) {
    layers[layer].family = family;
    layers[layer].shared = shared;
    launch_set_count(device_shared(layer), shared, stream_of(stream));
  }
  /// Takes the blocks from `first` on out of the family.
  void leave_family(uint32_t layer, uint32_t first, Stream stream) {
    if (first < layers[layer].shared) set_family(layer, layers[layer].family, first, stream);
  }
  /// Enqueues that nothing is known of the layer's rows: there are none.
  void forget_figures(uint32_t layer, Stream stream) const {
    check(
        cudaMemsetAsync(figures(layer), 0, shape.kv_heads * sizeof(CodeFigures), stream_of(stream)),
        "clearing figures of codes");
  }
  /// Enqueues the layer's new count, and marks the place in the stream for those that wait for it.
  void set_count(uint32_t layer, uint32_t count, Stream stream) {
    launch_set_count(device_count(layer), count, stream_of(stream));
    layers[layer].count = count;
    layers[layer].is_used = true;
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    (void)cudaStreamIsCapturing(stream_of(stream), &status);
    if (status == cudaStreamCaptureStatusNone) changed->record(stream_of(stream));
  }

  CodesShape shape;
  CodesLayout layout;
  int ordinal;
  RowWaits waits;
  std::vector<Layer> layers;
  uint32_t slots = 0;  // that are taken
  CodesVariants variants;
  bool ahead = false;  // kernels start before those in front of them have ended
  /// Device memory that is taken, or is about to be: the account learns of it.
  void account_for(size_t now) {
    if (now > claimed && account.claim) account.claim(now - claimed);
    if (now < claimed && account.release) account.release(claimed - now);
    claimed = now;
  }
  [[nodiscard]] size_t bytes() const { return layout.others_bytes + coded->held_bytes(); }
  /// Called before bytes [begin, end) of the blocks are written: exchanges memory that others share for memory of
  /// their own.
  void own_blocks(size_t begin, size_t end) {
    if (coded->owns(begin, end)) return;
    account_for(claimed + coded->missing_bytes(begin, end));
    try {
      coded->own(begin, end);
    } catch (...) {
      account_for(bytes());
      throw;
    }
    account_for(bytes());
  }

  DeviceBuffer memory;                 // but for blocks,
  std::unique_ptr<PagedMemory> coded;  // which copies share
  CudaCodes::Account account;
  size_t claimed = 0;
  std::unique_ptr<EncodeLauncher> encoder;
  std::unique_ptr<RowExchange> exchange;  // null: the device reads rows itself
  std::unique_ptr<OwnStream> own;         // of balances, and of what is read back
  std::unique_ptr<Event> changed;         // the newest change of blocks
};

CudaCodes::CudaCodes(const CodesShape& shape, int ordinal, const RowWaits& waits,
                     uint32_t resident_tokens)
    : impl_(std::make_unique<Impl>(shape, ordinal, waits, resident_tokens)) {}

CudaCodes::~CudaCodes() {
  const Account account = impl_->account;
  const size_t claimed = impl_->claimed;
  impl_.reset();
  if (account.release) account.release(claimed);
}

void CudaCodes::set_account(Account account, size_t claimed) {
  impl_->account = std::move(account);
  impl_->claimed = claimed;
  impl_->account_for(impl_->bytes());
}

void CudaCodes::set_balance(uint32_t layer, uint32_t kv_head, const float* key_scale,
                            float value_scale) {
  Impl& m = *impl_;
  const Impl::Layer& l = m.name_layer(layer);
  m.check_head(kv_head);
  const uint32_t dim = m.shape.code.dim;
  const auto is_scale = [](float x) { return x > 0.0F && std::isfinite(x); };
  for (uint32_t j = 0; j < dim; ++j) {
    if (!is_scale(key_scale[j])) {
      refuse("the scale of channel " + std::to_string(j) + " is " + std::to_string(key_scale[j]) +
             "; allowed are finite numbers above 0");
    }
  }
  if (!is_scale(value_scale)) {
    refuse("the scale of values is " + std::to_string(value_scale) +
           "; allowed are finite numbers above 0");
  }
  const DeviceScope scope(m.ordinal);
  const BesideCapture beside;
  if (l.is_used) m.changed->wait("encoding keys and values");
  const auto copy = [&](float* to, const float* from, size_t n) {
    check(cudaMemcpyAsync(to, from, n * sizeof(float), cudaMemcpyHostToDevice, m.own->get()),
          "copying the balance of codes to the device");
  };
  copy(m.key_scales(layer) + size_t{kv_head} * dim, key_scale, dim);
  copy(m.value_scales(layer) + kv_head, &value_scale, 1);
  m.own->wait("copying the balance of codes to the device");
}

void CudaCodes::set_rows(uint32_t layer, const KvView& rows) {
  constexpr size_t kAlignment = 16;
  const auto is_aligned = [](size_t x) { return x % kAlignment == 0; };
  const size_t apart = rows.keys.head_stride * dtype_size(impl_->shape.dtype);
  if (!is_aligned(reinterpret_cast<uintptr_t>(rows.keys.data)) ||
      !is_aligned(reinterpret_cast<uintptr_t>(rows.values.data)) || !is_aligned(apart)) {
    refuse("rows whose addresses, or whose distance of " + std::to_string(apart) +
           " bytes from head to head, are no multiples of 16");
  }
  if ((rows.keys.scales.data != nullptr) != (impl_->shape.dtype == DType::i8)) {
    refuse("scales of rows come with those of dtype i8, and with no others");
  }
  impl_->name_layer(layer).rows = rows;
}

void CudaCodes::encode(uint32_t layer, uint32_t first, uint32_t count, Stream stream) {
  Impl& m = *impl_;
  const Impl::Layer& l = m.layer_at(layer);
  if (first > l.count || first > m.shape.blocks || count > m.shape.blocks - first) {
    refuse("blocks " + std::to_string(first) + " to " + std::to_string(uint64_t{first} + count) +
           " of a layer that has " + std::to_string(l.count) + " and room for " +
           std::to_string(m.shape.blocks));
  }
  const RowsView &keys = l.rows.keys, &values = l.rows.values;
  if (count != 0 && (keys.data == nullptr || values.data == nullptr)) {
    refuse("rows that were not set");
  }
  const DeviceScope scope(m.ordinal);
  const size_t begin = l.slot * m.layout.layer_stride + first * m.layout.block_stride;
  const size_t end = begin + count * m.layout.block_stride;
  if (!m.coded->owns(begin, end)) {
    // Steps that were enqueued still read the pages that are exchanged.
    const BesideCapture beside;
    check(cudaStreamSynchronize(stream_of(stream)), "steps before encoding");
    m.own_blocks(begin, end);
  }
  m.leave_family(layer, first, stream);
  if (first == 0) m.forget_figures(layer, stream);
  EncodeParams p;
  p.shape = m.shape.code;
  p.dtype = m.shape.dtype;
  p.kv_heads = m.shape.kv_heads;
  p.first = first;
  p.count = count;
  p.keys = keys.data;
  p.values = values.data;
  p.rows_stride = m.head_bytes(layer);
  p.row_scales = keys.scales.data;
  p.row_scales_out = m.row_scales(layer);
  p.key_scale = m.key_scales(layer);
  p.value_scale = m.value_scales(layer);
  p.blocks = m.blocks(layer);
  p.block_stride = m.layout.block_stride;
  p.head_stride = m.layout.head_stride;
  p.arrivals = m.memory.as<uint32_t>(m.layout.arrivals);
  p.figures = m.figures(layer);
  if (m.exchange == nullptr) {
    m.encoder->launch(p, stream_of(stream));
  } else {
    const BesideCapture beside;
    encode_copied(*m.encoder, p, m.shape.code.dim * dtype_size(m.shape.dtype),
                  {m.memory.data() + m.layout.copied, m.layout.copied_blocks}, stream_of(stream));
  }
  m.set_count(layer, first + count, stream);
}

void CudaCodes::truncate(uint32_t layer, uint32_t blocks, Stream stream) {
  Impl& m = *impl_;
  if (blocks > m.layer_at(layer).count) {
    refuse("a cut to " + std::to_string(blocks) + " blocks of a layer that has " +
           std::to_string(m.layers[layer].count));
  }
  const DeviceScope scope(m.ordinal);
  m.leave_family(layer, blocks, stream);
  if (blocks == 0) m.forget_figures(layer, stream);
  m.set_count(layer, blocks, stream);
}

void CudaCodes::copy_layer(uint32_t layer, Codes& from) {
  Impl& m = *impl_;
  CudaCodes* const there = from.on_cuda();
  if (there == nullptr) refuse("a copy of a layer of another device");
  Impl& f = *there->impl_;
  const Impl::Layer& source = f.layer_at(layer);
  const Impl::Layer& l = m.name_layer(layer);
  const bool is_alike = m.shape.code.dim == f.shape.code.dim &&
                        m.shape.code.key_bits == f.shape.code.key_bits &&
                        m.shape.kv_heads == f.shape.kv_heads && m.shape.blocks == f.shape.blocks &&
                        m.shape.dtype == f.shape.dtype;
  if (!is_alike || m.ordinal != f.ordinal) refuse("a copy of a layer of another shape");
  if (l.count != 0) {
    refuse("a copy of a layer where there are " + std::to_string(l.count) + " blocks already");
  }
  const DeviceScope scope(m.ordinal);
  const BesideCapture beside;
  f.changed->wait("encoding keys and values");
  if (l.is_used) m.changed->wait("encoding keys and values");
  const size_t begin = l.slot * m.layout.layer_stride;
  const size_t end = begin + source.count * m.layout.block_stride;
  PagedMemory::Stretch shared{begin, begin};
  if (l.slot == source.slot) shared = m.coded->share(*f.coded, begin, end);
  m.account_for(m.bytes());
  m.own_blocks(begin, shared.begin);
  m.own_blocks(shared.end, end);
  const auto copy = [&](void* to, const void* data, size_t bytes) {
    check(cudaMemcpyAsync(to, data, bytes, cudaMemcpyDeviceToDevice, m.own->get()),
          "copying codes");
  };
  const size_t behind = shared.end - begin;
  copy(m.blocks(layer), f.blocks(layer), shared.begin - begin);
  copy(m.blocks(layer) + behind, f.blocks(layer) + behind, end - shared.end);
  const size_t heads = m.shape.kv_heads, dim = m.shape.code.dim;
  copy(m.key_scales(layer), f.key_scales(layer), heads * dim * sizeof(float));
  copy(m.value_scales(layer), f.value_scales(layer), heads * sizeof(float));
  copy(m.figures(layer), f.figures(layer), heads * sizeof(CodeFigures));
  if (m.shape.dtype == DType::i8) {
    copy(m.row_scales(layer), f.row_scales(layer),
         source.count * heads * 2 * dim * sizeof(uint16_t));
  }
  // Joins a family that has most of the blocks in common; otherwise the two become a new one.
  if (source.family == nullptr || source.shared < source.count / 2) {
    f.set_family(layer, std::make_shared<const char>(), source.count, m.own->get());
  }
  m.set_family(layer, source.family, source.shared, m.own->get());
  m.set_count(layer, source.count, m.own->get());
  m.own->wait("copying codes");
}

void CudaCodes::complete() {
  Impl& m = *impl_;
  const DeviceScope scope(m.ordinal);
  const BesideCapture beside;
  // Goes layer by layer; memory that copies have brought is not exchanged.
  const size_t stride = m.layout.layer_stride;
  std::vector<size_t> ends(coded_layers(m.shape));
  for (const Impl::Layer& l : m.layers) {
    if (l.slot != kNoSlot) ends[l.slot] = l.count * m.layout.block_stride;
  }
  for (size_t slot = 0; slot < ends.size(); ++slot) {
    m.own_blocks(slot * stride + ends[slot], (slot + 1) * stride);
  }
}

uint32_t CudaCodes::count(uint32_t layer) const {
  impl_->check_layer(layer);
  return impl_->layers[layer].count;
}

uint32_t CudaCodes::serve_rows(uint32_t kv_head) {
  Impl& m = *impl_;
  m.check_head(kv_head);
  if (m.exchange == nullptr) return 0;
  return m.exchange->serve(kv_head, [&](uint32_t layer) {
    return m.layer_at(layer).rows.slice(0, size_t{m.shape.blocks} * kCodeBlock);
  });
}

void CudaCodes::give_up_rows(uint32_t step) {
  if (impl_->exchange != nullptr) impl_->exchange->give_up(step);
}

void CudaCodes::read(uint32_t layer, uint32_t kv_head, uint32_t block, std::byte* out) const {
  const Impl& m = *impl_;
  m.check_head(kv_head);
  if (block >= m.layer_at(layer).count) {
    refuse("block " + std::to_string(block) + " of " + std::to_string(m.layers[layer].count));
  }
  const DeviceScope scope(m.ordinal);
  const BesideCapture beside;
  m.changed->wait("encoding keys and values");
  const size_t bytes = m.shape.code.block_bytes();
  const size_t at = block * m.layout.block_stride + kv_head * m.layout.head_stride;
  check(cudaMemcpyAsync(out, m.blocks(layer) + at, bytes, cudaMemcpyDeviceToHost, m.own->get()),
        "reading codes back");
  m.own->wait("reading codes back");
}

size_t CudaCodes::bytes() const { return impl_->bytes(); }

CodesDoubts CudaCodes::doubts() const {
  const Impl& m = *impl_;
  const DeviceScope scope(m.ordinal);
  const BesideCapture beside;
  DoubtBoard board;
  check(cudaMemcpyAsync(&board, m.memory.data() + m.layout.doubt, sizeof board,
                        cudaMemcpyDeviceToHost, m.own->get()),
        "reading what codes could not tell");
  m.own->wait("reading what codes could not tell");
  return {board.doubted, board.given_up, board.rows};
}

CodesStep CudaCodes::describe(uint32_t layer, const TensorView& q, uint32_t tokens) const {
  return impl_->step(layer, q, tokens);
}

bool CudaCodes::launches_ahead() const { return impl_->ahead; }

uint32_t CudaCodes::most_tokens(uint32_t /*layer*/) const { return impl_->variants.most_tokens(); }

std::unique_ptr<Codes> make_cuda_codes(const ResidentPlace& place, const CodesShape& shape) {
  const SessionMemory session(place, "codes on a CUDA device");
  const ResidentShape& r = place.shape;
  if (shape.layers != r.layers || shape.q_heads != r.q_heads || shape.kv_heads != r.kv_heads ||
      shape.code.dim != r.head_dim || (shape.dtype != r.dtype && shape.dtype != DType::i8) ||
      shape.logits != r.logits || shape.layer_logits != r.layer_logits) {
    refuse("layers, heads, head dimension, dtype or logits are not those of the resident tokens");
  }
  (void)with_kernels(shape);
  const size_t bytes = codes_bytes(shape);
  session.claim(bytes, "codes of keys and values");
  try {
    auto codes = std::make_unique<CudaCodes>(shape, session.ordinal(), place.waits,
                                             r.sink + r.window_capacity);
    codes->set_account({[session](size_t more) { session.claim(more, "codes of keys and values"); },
                        [session](size_t less) { session.release(less); }},
                       bytes);
    return codes;
  } catch (...) {
    session.release(bytes);
    throw;
  }
}

}  // namespace keyhole::gpu
