#include "runtime/stream/device_codes.h"

#include <algorithm>
#include <new>
#include <string>
#include <utility>

#include "cpu/aligned.h"
#include "gpu/pinned_memory.h"

namespace keyhole::runtime {
namespace {

// Arrays have huge pages from the second on (OffloadStore), and are pinned by these: a call of the driver takes 42 us
// for 256 KiB and 70 us for 2 MiB. Rows before are pinned in multiples of it, 256 KiB an array at d = 128 in 16 bits:
// what is pinned takes memory, whether rows come or not.
constexpr size_t kPinnedTogether = 1024;
// Rows of a layer that a prompt pins together while it goes on: a launch that comes meanwhile waits for the call, so
// that many short calls cost a prompt more than a few long ones.
constexpr size_t kPinnedBeside = 32768;
// Most bytes of a call, 1.4 ms, for which launches wait.
constexpr size_t kMostOfACall = size_t{64} << 20U;

constexpr size_t whole_blocks(size_t rows) {
  return (rows + kCodeBlock - 1) / kCodeBlock * kCodeBlock;
}

}  // namespace

DeviceCodes::DeviceCodes(const SessionParams& params, const ModelShape& model, Make make,
                         MakePin make_pin, Room room, CodeSource& source, const Log& log,
                         const RowServer::Waits& waits)
    : params_(&params),
      model_(model),
      make_(std::move(make)),
      make_pin_(std::move(make_pin)),
      room_(std::move(room)),
      source_(&source),
      log_(log),
      given_up_(model.layers),
      waits_(waits),
      layers_(model.layers) {
  wanted_.layers.assign(model.layers, 0);
  plan_ = wanted_;
}

// ---- Which layers --------------------------------------------------------------------------------

void DeviceCodes::plan(std::span<const HeadParams* const> heads) {
  CodePlan wanted = plan_codes(*params_, model_, heads, specs_);
  check_placement(wanted, *params_, model_);
  if (wanted.any() && source_->row_block() != kCodeBlock) {
    // The session began with another index, and its rows do not fill blocks.
    wanted.layers.assign(model_.layers, 0);
  }
  const bool tries_again = std::exchange(tries_again_, false);
  if (wanted == wanted_) {
    if (!tries_again || plan_ == this->wanted()) return;
    const CodePlan fits = fitting_room(bytes());
    if (fits.count() < plan_.count()) return;
    if (fits.count() == plan_.count() && fits.lists == plan_.lists) return;
  } else {
    wanted_ = wanted;
    given_up_.assign(model_.layers, 0);
    cannot_pin_ = false;
  }
  drop();
  if (this->wanted().any()) try_to_make();
}

void DeviceCodes::try_to_make(const std::string& why_by_host) {
  try {
    make(wanted());
    if (!why_by_host.empty()) tell_reader(why_by_host);
  } catch (const Error& e) {
    drop();
    if (must_be_here()) {
      wanted_.layers.assign(model_.layers, 0);  // the next plan() throws again
      throw;
    }
    tell(e.what());
  }
}

CodePlan DeviceCodes::wanted() const {
  CodePlan plan = wanted_;
  plan.rows_by_host = plan.rows_by_host || cannot_pin_;
  for (uint32_t l = 0; l < model_.layers; ++l) plan.layers[l] &= given_up_[l] == 0 ? 1 : 0;
  return plan;
}

CodePlan DeviceCodes::fitting_room(size_t held) const {
  uint64_t room = room_ ? room_(held) : UINT64_MAX;
  room += std::min(shared_bytes(), UINT64_MAX - room);
  return fitting(wanted(), {room, pinned_room(*params_, model_)}, params_->max_tokens, *params_,
                 model_);
}

uint64_t DeviceCodes::shared_bytes() const {
  if (copied_ == nullptr || copied_->codes_ == nullptr) return 0;
  uint64_t bytes = 0;
  for (uint32_t l = 0; l < model_.layers; ++l) {
    if (!copied_->layer_has(l)) continue;
    const LayerShape shape = model_.of(l);
    CodeShape code = copied_->plan_.shape;
    code.dim = shape.head_dim;
    bytes += uint64_t{copied_->codes_->count(l)} * shape.kv_heads * code.block_bytes();
  }
  return bytes;
}

std::string DeviceCodes::too_much_to_pin(const CodePlan& plan) const {
  const CodeBytes bytes = code_bytes(plan, params_->max_tokens, *params_, model_);
  return "codes on the device need " + std::to_string(bytes.pinned) +
         " bytes of pinned host memory, pinned_memory_limit is " +
         std::to_string(params_->pinned_memory_limit);
}

void DeviceCodes::check_room(const CodePlan& plan) const {
  const CodeBytes bytes = code_bytes(plan, params_->max_tokens, *params_, model_);
  const uint64_t pinned = pinned_room(*params_, model_);
  if (bytes.pinned > pinned) throw Error(Status::out_of_memory, too_much_to_pin(plan));
  const size_t limit = params_->device_memory_limit;
  const size_t held = gpu::cuda_resident_bytes(params_->resident_shape(model_));
  if (limit != 0 && held + bytes.device > limit) {
    throw Error(Status::out_of_device_memory,
                "codes on the device need " + std::to_string(bytes.device) +
                    " bytes more than the " + std::to_string(held) +
                    " held, device_memory_limit is " + std::to_string(limit));
  }
  const uint64_t room = room_ ? room_(0) : UINT64_MAX;
  if (!must_be_here() && bytes.device > room && bytes.device - room > shared_bytes()) {
    throw Error(Status::out_of_device_memory,
                "codes on the device need " + std::to_string(bytes.device) +
                    " bytes, there is room for " + std::to_string(room));
  }
}

void DeviceCodes::make(CodePlan plan) {
  const gpu::CodesShape shape = codes_shape(plan, params_->max_tokens, *params_, model_);
  if (!make_ || !make_pin_) throw Error(Status::unsupported, "the device has no codes");
  if (const std::string why = gpu::why_no_codes(shape); !why.empty()) {
    throw Error(Status::unsupported, why);
  }
  std::string why_not_all, why_by_host, why_no_lists;
  if (must_be_here()) {
    CodePlan placed = with_rows_placed(plan, pinned_room(*params_, model_), params_->max_tokens,
                                       *params_, model_);
    if (placed.rows_by_host != plan.rows_by_host) why_by_host = too_much_to_pin(plan);
    plan = std::move(placed);
  }
  try {
    check_room(plan);
  } catch (const Error& e) {
    if (must_be_here() && plan.lists.rows == 0) throw;
    CodePlan fits = must_be_here() ? plan : fitting_room(0);
    if (must_be_here()) {
      fits.lists = {};
      check_room(fits);
    }
    if (!fits.any()) throw;
    if (fits.rows_by_host != plan.rows_by_host) why_by_host = too_much_to_pin(plan);
    if (fits.count() != plan.count()) why_not_all = e.what();
    if (fits.lists != plan.lists) why_no_lists = e.what();
    plan = std::move(fits);
  }
  if (!plan.rows_by_host) {
    try {
      pins_ = std::make_unique<PinQueue>(make_pin_());
    } catch (const Error& e) {
      if (params_->exact_rows_by != KEYHOLE_ROWS_BY_AUTO) throw;
      cannot_pin_ = plan.rows_by_host = true;
      why_by_host = e.what();
    }
  }
  for (;;) {
    gpu::CodesShape of_plan = codes_shape(plan, params_->max_tokens, *params_, model_);
    of_plan.blocks_later = copied_ != nullptr;
    try {
      codes_ = make_(of_plan);
      lists_from_ = of_plan.list_rows == 0 ? 0 : whole_blocks(of_plan.lists_from);
      break;
    } catch (const Error& e) {
      const bool is_full = e.status() == Status::out_of_device_memory;
      if (is_full && of_plan.list_rows != 0) {
        why_no_lists = e.what();
        plan.lists = {};
        continue;
      }
      if (!is_full || must_be_here() || plan.count() == 1) throw;
      why_not_all = e.what();
      // A quarter less each time: what is left over, others on the device may need.
      for (uint32_t less = (plan.count() + 3) / 4; less != 0; --less) plan.layers[plan.first()] = 0;
    }
  }
  plan_ = plan;
  bytes_peak_ = std::max(bytes_peak_, this->bytes());
  if (plan.rows_by_host) {
    exchange_bytes_ = code_bytes(plan, params_->max_tokens, *params_, model_).pinned;
    // A step that reads no row asks for none.
    if (plan.exact_rows != 0) {
      reader_ = std::make_unique<RowServer>(*codes_, most_kv_heads(), waits_);
    }
  }
  for (uint32_t layer = 0; layer < model_.layers; ++layer) {
    if (!layer_has(layer)) continue;
    codes_->set_rows(layer, source_->rows(layer));
  }
  tell(why_not_all);
  if (!why_by_host.empty()) tell_reader(why_by_host);
  if (!why_no_lists.empty()) {
    log_(KEYHOLE_LOG_WARNING, "steps read all codes, without lists of near rows: " + why_no_lists);
  }
}

void DeviceCodes::copy() {
  const DeviceCodes* const from = std::exchange(copied_, nullptr);
  if (from == nullptr || codes_ == nullptr) return;
  try {
    const bool is_alike = from->plan_.shape.key_bits == plan_.shape.key_bits &&
                          from->plan_.shape.value_bits == plan_.shape.value_bits;
    for (uint32_t l = 0; is_alike && l < model_.layers; ++l) {
      const bool has = layer_has(l) && from->layer_has(l) && from->layers_[l].has_balance;
      if (!has || from->codes_->count(l) == 0) continue;
      codes_->copy_layer(l, *from->codes_);
      layers_[l].has_balance = layers_[l].is_copy = true;
    }
    codes_->complete();
    bytes_peak_ = std::max(bytes_peak_, this->bytes());
  } catch (const Error& e) {
    give_up(e.what());
    if (must_be_here() || e.status() != Status::out_of_device_memory) throw;
  }
}

void DeviceCodes::tell_reader(const std::string& why) const {
  log_(KEYHOLE_LOG_WARNING, "the host reads the tokens that the device attends exactly: " + why);
}

void DeviceCodes::tell(const std::string& why_not_all) const {
  if (!plan_.any()) {
    log_(KEYHOLE_LOG_WARNING,
         "no codes on the device, the host attends what is offloaded: " + why_not_all);
    return;
  }
  const std::string there = "codes on the device: layers " + plan_.text() + ", " +
                            std::to_string(codes_->bytes()) + " bytes, rows read by the " +
                            (plan_.rows_by_host ? "host" : "device");
  if (why_not_all.empty()) return log_(KEYHOLE_LOG_INFO, there);
  CodePlan host = wanted_;
  for (uint32_t l = 0; l < model_.layers; ++l) host.layers[l] &= plan_.layers[l] == 0 ? 1 : 0;
  log_(KEYHOLE_LOG_WARNING,
       there + "; the host attends layers " + host.text() + ": " + why_not_all);
}

bool DeviceCodes::let_host_read(const std::string& why) {
  if (params_->exact_rows_by != KEYHOLE_ROWS_BY_AUTO || plan_.rows_by_host) return false;
  cannot_pin_ = true;
  drop();
  try_to_make(why);
  return true;
}

void DeviceCodes::give_up_first(const std::string& why) {
  const uint32_t layer = plan_.first();
  version_ += 1;
  codes_->stop_lists(layer);
  drop_pieces(layer, 0);
  layers_[layer] = {};
  plan_.layers[layer] = 0;
  given_up_[layer] = 1;
  if (plan_.any()) {
    if (pins_ != nullptr) pins_->resume();
  } else {
    drop();
  }
  tell(why);
}

void DeviceCodes::give_up(const std::string& why) {
  drop();
  tell(why);
}

gpu::CodesDoubts DeviceCodes::doubts() const {
  gpu::CodesDoubts sum = past_doubts_;
  if (codes_ != nullptr) sum += codes_->doubts();
  return sum;
}

void DeviceCodes::drop() {
  version_ += 1;
  try {
    past_doubts_ = doubts();
  } catch (const Error&) {  // a device that has failed cannot tell any more
  }
  reader_.reset();
  codes_.reset();
  lists_from_ = 0;
  exchange_bytes_ = 0;
  pins_.reset();  // with all that it has pinned
  for (uint32_t layer = 0; layer < model_.layers; ++layer) {
    if (layers_[layer].end() != 0) source_->set_pinned(layer, 0);
    layers_[layer] = {};
  }
  plan_ = {};
  plan_.layers.assign(model_.layers, 0);
}

// ---- Rows that come and go -----------------------------------------------------------------------

bool DeviceCodes::is_current(uint32_t layer) const {
  const size_t rows = source_->rows(layer).keys.tokens;
  const bool is_pinned =
      pins_ == nullptr || (layers_[layer].end() >= rows && !layers_[layer].is_copy);
  return is_pinned && size_t{codes_->count(layer)} * kCodeBlock == rows;
}

void DeviceCodes::pin_beside(uint32_t layer) {
  const size_t rows = source_->rows(layer).keys.tokens;
  if (const uint32_t former = std::exchange(filling_, layer); former != layer) {
    if (layer_has(former)) pin(former, source_->rows(former).keys.tokens);
  }
  if (!layer_has(layer) || rows == 0) return;
  if (rows >= layers_[layer].end() + kPinnedBeside) pin(layer, rows);
  // From the rows that are there now, however soon they are pinned.
  if (!layers_[layer].has_balance) set_balance(layer);
}

void DeviceCodes::encode_pinned(gpu::Stream stream) {
  if (codes_ == nullptr) return;
  try {
    if (pins_ != nullptr) pins_->check(last_batch());
  } catch (...) {
    if (must_be_here()) pins_->resume();
    throw;
  }
  for (uint32_t l = 0; l < model_.layers; ++l) {
    if (!layer_has(l) || !layers_[l].has_balance) continue;
    if (!is_current(l)) encode(l, pinned_rows(l), stream);
    list(l, false);
  }
}

void DeviceCodes::update(uint32_t layer, gpu::Stream stream) {
  if (!is_current(layer)) make_current(layer, stream);
  codes_->use_lists(layer, stream);
  list(layer, true);
}

void DeviceCodes::make_current(uint32_t layer, gpu::Stream stream) {
  const size_t rows = source_->rows(layer).keys.tokens;
  pin(layer, rows);
  if (!layers_[layer].has_balance) set_balance(layer);
  if (must_be_here() && pins_ != nullptr) pins_->resume();
  for (const Piece& piece : layers_[layer].pieces) {
    if (piece.begin < rows) pins_->wait(piece.batch);
  }
  layers_[layer].is_copy = false;
  encode(layer, rows, stream);
  // A decoder that appends finds its next block pinned.
  pin(layer, rows + kCodeBlock);
}

void DeviceCodes::list(uint32_t layer, bool is_before_step) {
  size_t rows = size_t{codes_->count(layer)} * kCodeBlock;
  if (lists_from_ == 0 || rows < lists_from_) return;
  size_t begin = codes_->made_lists(layer);
  const auto least = [&] {
    if (!is_before_step) return size_t{gpu::kListStretch};
    return begin < lists_from_ ? std::min(kRowsListed, lists_from_ - begin) : kRowsListed;
  };
  if (rows - begin < least() || !codes_->takes_lists(layer)) return;
  // The codes of a copy are here before its rows are pinned.
  rows = std::min(rows, pinned_rows(layer) / kCodeBlock * kCodeBlock);
  if (rows < begin) return;
  try {
    while (rows - begin >= least()) {
      const size_t count = std::min<size_t>(rows - begin, gpu::kListStretch);
      if (!codes_->make_lists(layer, static_cast<uint32_t>(begin), static_cast<uint32_t>(count))) {
        return;
      }
      begin += count;
    }
  } catch (const std::bad_alloc&) {  // steps read blocks where there are no lists
  }
}

void DeviceCodes::encode(uint32_t layer, size_t rows, gpu::Stream stream) {
  const uint32_t first = codes_->count(layer);
  const auto blocks = static_cast<uint32_t>(rows / kCodeBlock);
  if (blocks > first) codes_->encode(layer, first, blocks - first, stream);
}

uint32_t DeviceCodes::most_kv_heads() const {
  uint32_t most = 1;
  for (uint32_t l = 0; l < model_.layers; ++l) {
    if (layer_has(l)) most = std::max(most, model_.of(l).kv_heads);
  }
  return most;
}

size_t DeviceCodes::piece_end(uint32_t layer, size_t rows) const {
  const size_t huge = cpu::kHugePageBytes / row_bytes(layer) / kCodeBlock * kCodeBlock;
  const size_t unit = rows > huge ? huge : kPinnedTogether;
  return std::min((rows + unit - 1) / unit * unit, coded_rows(params_->max_tokens, *params_));
}

std::vector<PinQueue::Range> DeviceCodes::ranges(uint32_t layer, const Piece& piece) const {
  const size_t row_bytes = this->row_bytes(layer);
  std::vector<PinQueue::Range> ranges;
  for (uint32_t h = 0; h < model_.of(layer).kv_heads; ++h) {
    const KvView kv = source_->rows(layer).head(h);
    for (const std::byte* array : {kv.keys.data, kv.values.data}) {
      const std::byte* const end = array + piece.end * row_bytes;
      for (const std::byte* at = array + piece.begin * row_bytes; at < end; at += kMostOfACall) {
        ranges.push_back({at, std::min<size_t>(kMostOfACall, static_cast<size_t>(end - at))});
      }
    }
  }
  const size_t from = scale_bytes(layer, piece.begin), to = scale_bytes(layer, piece.end);
  if (from != to) {
    ranges.push_back(
        {reinterpret_cast<const std::byte*>(source_->scales(layer)) + from, to - from});
  }
  return ranges;
}

void DeviceCodes::pin(uint32_t layer, size_t rows) {
  if (pins_ == nullptr) return;
  Layer& l = layers_[layer];
  Piece piece{l.end(), piece_end(layer, rows), 0};
  if (piece.end <= piece.begin) return;
  // From now on none of it may be given back.
  l.pieces.reserve(l.pieces.size() + 1);
  source_->set_pinned(layer, piece.end);
  try {
    piece.batch = pins_->add(ranges(layer, piece));
  } catch (...) {
    source_->set_pinned(layer, piece.begin);
    throw;
  }
  l.pieces.push_back(piece);
}

size_t DeviceCodes::pinned_rows(uint32_t layer) const {
  if (pins_ == nullptr) return source_->rows(layer).keys.tokens;
  size_t rows = 0;
  for (const Piece& piece : layers_[layer].pieces) {
    if (!pins_->is_pinned(piece.batch)) break;
    rows = piece.end;
  }
  return std::min(rows, source_->rows(layer).keys.tokens);
}

uint64_t DeviceCodes::last_batch() const {
  uint64_t last = 0;
  for (uint32_t l = 0; l < model_.layers; ++l) {
    if (layers_[l].pieces.empty()) continue;
    const size_t rows = source_->rows(l).keys.tokens;
    for (const Piece& piece : layers_[l].pieces) {
      if (piece.begin < rows) last = std::max(last, piece.batch);
    }
  }
  return last;
}

size_t DeviceCodes::scale_bytes(uint32_t layer, size_t rows) const {
  if (source_->scales(layer) == nullptr) return 0;
  const size_t bytes = rows / kScaleRows * block_scale_bytes(layer);
  return (bytes + gpu::kPinAlignment - 1) / gpu::kPinAlignment * gpu::kPinAlignment;
}

void DeviceCodes::set_balance(uint32_t layer) {
  source_->learn_balances(layer);
  for (uint32_t h = 0; h < model_.of(layer).kv_heads; ++h) {
    const index::Balance& balance = source_->balance(layer, h);
    codes_->set_balance(layer, h, balance.key_scale.data(), balance.value_scale);
  }
  layers_[layer].has_balance = true;
}

void DeviceCodes::truncate(uint32_t layer, size_t rows, gpu::Stream stream) {
  if (!layer_has(layer)) return;
  const auto blocks = static_cast<uint32_t>(rows / kCodeBlock);
  if (blocks < codes_->count(layer)) codes_->truncate(layer, blocks, stream);
  // With no rows left, the head's balance is learned anew.
  if (rows == 0) layers_[layer].has_balance = false;
  drop_pieces(layer, rows);
  // The next step pins again what is left of them.
  if (pins_ != nullptr && source_->is_shared(layer, rows)) {
    codes_->stop_lists(layer);
    unpin_across(layer, rows);
  }
}

void DeviceCodes::unpin_across(uint32_t layer, size_t rows) {
  // Blocks of rows fill whole pages, their scales do not.
  const size_t scales =
      source_->scales(layer) == nullptr
          ? 0
          : rows / kScaleRows * block_scale_bytes(layer) / gpu::kPinAlignment * gpu::kPinAlignment;
  const std::vector<Piece>& pieces = layers_[layer].pieces;
  while (!pieces.empty() &&
         (pieces.back().end > rows || scale_bytes(layer, pieces.back().end) > scales)) {
    drop_pieces(layer, pieces.back().begin);
  }
}

void DeviceCodes::drop_pieces(uint32_t layer, size_t rows) {
  Layer& l = layers_[layer];
  const size_t end = l.end();
  while (!l.pieces.empty() && l.pieces.back().begin >= rows) {
    pins_->drop(l.pieces.back().batch, ranges(layer, l.pieces.back()));
    l.pieces.pop_back();
  }
  if (l.end() != end) source_->set_pinned(layer, l.end());
}

}  // namespace keyhole::runtime
