#include "gpu/cuda/codes/cuda_codes.h"

#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "gpu/cuda/codes/codes_memory.h"
#include "gpu/cuda/codes/encode_copied.h"
#include "gpu/cuda/common/session_memory.h"

namespace keyhole::gpu {

CudaCodes::CudaCodes(const CodesShape& shape, int ordinal, const RowWaits& waits,
                     uint32_t resident_tokens)
    : impl_(std::make_unique<Impl>(shape, ordinal, waits, resident_tokens)) {}

CudaCodes::~CudaCodes() {
  const Account account = impl_->account;
  const size_t claimed = impl_->claimed;
  {
    // It waits for what reads rows, which may be gone when this returns.
    const BesideCapture beside;
    impl_.reset();
  }
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
      refuse_codes("the scale of channel " + std::to_string(j) + " is " +
                   std::to_string(key_scale[j]) + "; allowed are finite numbers above 0");
    }
  }
  if (!is_scale(value_scale)) {
    refuse_codes("the scale of values is " + std::to_string(value_scale) +
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
    refuse_codes("rows whose addresses, or whose distance of " + std::to_string(apart) +
                 " bytes from head to head, are no multiples of 16");
  }
  if ((rows.keys.scales.data != nullptr) != (impl_->shape.dtype == DType::i8)) {
    refuse_codes("scales of rows come with those of dtype i8, and with no others");
  }
  impl_->name_layer(layer).rows = rows;
}

void CudaCodes::encode(uint32_t layer, uint32_t first, uint32_t count, Stream stream) {
  Impl& m = *impl_;
  const Impl::Layer& l = m.layer_at(layer);
  if (first > l.count || first > m.shape.blocks || count > m.shape.blocks - first) {
    refuse_codes("blocks " + std::to_string(first) + " to " +
                 std::to_string(uint64_t{first} + count) + " of a layer that has " +
                 std::to_string(l.count) + " and room for " + std::to_string(m.shape.blocks));
  }
  const RowsView &keys = l.rows.keys, &values = l.rows.values;
  if (count != 0 && (keys.data == nullptr || values.data == nullptr)) {
    refuse_codes("rows that were not set");
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
  m.drop_lists(layer, first, stream);
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
    refuse_codes("a cut to " + std::to_string(blocks) + " blocks of a layer that has " +
                 std::to_string(m.layers[layer].count));
  }
  const DeviceScope scope(m.ordinal);
  m.leave_family(layer, blocks, stream);
  m.drop_lists(layer, blocks, stream);
  if (blocks == 0) m.forget_figures(layer, stream);
  m.set_count(layer, blocks, stream);
}

void CudaCodes::copy_layer(uint32_t layer, Codes& from) {
  Impl& m = *impl_;
  CudaCodes* const there = from.on_cuda();
  if (there == nullptr) refuse_codes("a copy of a layer of another device");
  Impl& f = *there->impl_;
  const Impl::Layer& source = f.layer_at(layer);
  const Impl::Layer& l = m.name_layer(layer);
  const bool is_alike = m.shape.code.dim == f.shape.code.dim &&
                        m.shape.code.key_bits == f.shape.code.key_bits &&
                        m.shape.kv_heads == f.shape.kv_heads && m.shape.blocks == f.shape.blocks &&
                        m.shape.dtype == f.shape.dtype;
  if (!is_alike || m.ordinal != f.ordinal) refuse_codes("a copy of a layer of another shape");
  if (l.count != 0) {
    refuse_codes("a copy of a layer where there are " + std::to_string(l.count) +
                 " blocks already");
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
  // A copy may have lists where its source has lost them, as the host reads its rows, and the other way round.
  if (!source.stretches.empty() && m.shape.list_rows == f.shape.list_rows &&
      m.in_lists.bytes() != 0) {
    copy(m.list_memory(layer), f.list_memory(layer), m.layout.list_stride);
    // A step of the source may be under way.
    check(cudaMemsetAsync(m.step_memory(layer), 0, sizeof(ListMemory), m.own->get()),
          "clearing what steps remember");
    check(cudaMemsetAsync(m.list_memory(layer) + m.layout.list_arrivals, 0,
                          m.shape.kv_heads * sizeof(uint32_t), m.own->get()),
          "clearing the counters of steps");
    m.layers[layer].stretches = source.stretches;
  }
  m.layers[layer].family = f.layers[layer].family.copied(source.count);
  f.tell_family(layer, m.own->get());
  m.tell_family(layer, m.own->get());
  m.set_count(layer, source.count, m.own->get());
  m.own->wait("copying codes");
}

CodedRows CudaCodes::coded_rows(uint32_t layer) const {
  const Impl& m = *impl_;
  m.check_layer(layer);
  const Impl::Layer& l = m.layers[layer];
  CodedRows r;
  if (l.count == 0 || m.exchange != nullptr || m.shape.exact_rows == 0) return r;
  r.code = m.shape.code;
  r.kv_heads = m.shape.kv_heads;
  r.blocks = l.count;
  r.blocks_at = m.blocks(layer);
  r.block_stride = m.layout.block_stride;
  r.head_stride = m.layout.head_stride;
  r.key_scale = m.key_scales(layer);
  r.value_scale = m.value_scales(layer);
  r.figures = m.figures(layer);
  r.keys = l.rows.keys.data;
  r.values = l.rows.values.data;
  r.kv_head_stride = m.head_bytes(layer);
  r.row_bytes = static_cast<uint32_t>(m.shape.code.dim * dtype_size(m.shape.dtype));
  r.dtype = m.shape.dtype;
  r.row_scales = m.row_scales(layer);
  return r;
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
    refuse_codes("block " + std::to_string(block) + " of " + std::to_string(m.layers[layer].count));
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
  std::vector<DoubtBoard> boards(most_codes_tokens(m.shape));  // of the parts of a step
  check(cudaMemcpyAsync(boards.data(), m.memory.data() + m.layout.doubt,
                        boards.size() * sizeof(DoubtBoard), cudaMemcpyDeviceToHost, m.own->get()),
        "reading what codes could not tell");
  m.own->wait("reading what codes could not tell");
  CodesDoubts all;
  for (const DoubtBoard& board : boards) {
    all.doubted += board.doubted;
    all.given_up += board.given_up;
    all.rows += board.rows;
  }
  return all;
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
    refuse_codes(
        "layers, heads, head dimension, dtype or logits are not those of the resident tokens");
  }
  (void)with_kernels(shape);
  const size_t bytes = codes_bytes(on_device(shape, session.ordinal()));
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
