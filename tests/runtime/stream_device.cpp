// The device with streams of the tests, as its header says.
#include "tests/runtime/stream_device.h"

#include <array>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "cpu/attention.h"

namespace keyhole::test {

void FakeStepGroup::launch(std::span<std::exception_ptr> errors) noexcept {
  const std::vector<uint32_t> kinds(steps_.size());
  gpu::divide_steps<kMost>(kinds, [&](std::span<const uint32_t> numbers) {
    std::exception_ptr error;
    try {
      faults_->on_call(DeviceCall::command);
      if (faults_->fails_together) throw Error(Status::device_error, "planted: a launch failed");
      faults_->launches_of_groups.push_back(static_cast<uint32_t>(numbers.size()));
      for (const uint32_t i : numbers) steps_[i]();
    } catch (...) {
      error = std::current_exception();
    }
    for (const uint32_t i : numbers) errors[i] = error;
  });
  steps_.clear();
}

FakeDevice::FakeDevice(const gpu::ResidentShape& shape, const cpu::Kernels& kernels,
                       FakeStream& stream, FakeFaults& faults)
    : shape_(shape),
      kernels_(&kernels),
      stream_(&stream),
      faults_(&faults),
      host_(shape, kernels),
      device_(shape, kernels),
      layers_(shape.layers) {
  for (Layer& l : layers_) {
    l.o.resize(size_t{shape.q_heads} * shape.head_dim);
    for (Rows& rows : l.rows) {
      const uint32_t tokens = gpu::most_step_tokens(shape.q_heads / shape.kv_heads);
      rows.q.resize(tokens * l.o.size());
      rows.k.resize(tokens * token_bytes());
      rows.v.resize(tokens * token_bytes());
    }
    l.lse.resize(shape.q_heads);
    l.delivered = std::vector<std::atomic<uint32_t>>(shape.kv_heads);
    l.coded_o.resize(l.o.size());
    l.coded_lse.resize(shape.q_heads);
    for (Answer& answer : l.answers) {
      answer.o.resize(l.o.size());
      answer.lse.resize(shape.q_heads);
    }
  }
}

void FakeDevice::append_sink(uint32_t l, const std::byte* k, const std::byte* v, uint32_t n) {
  command();
  wait_idle(l);
  host_.append_sink(l, k, v, n);
  device_.append_sink(l, k, v, n);
}

void FakeDevice::append_window(uint32_t l, const std::byte* k, const std::byte* v, uint32_t n) {
  command();
  wait_idle(l);
  host_.append_window(l, k, v, n);
  device_.append_window(l, k, v, n);
}

void FakeDevice::evict(uint32_t l, std::byte* k, std::byte* v, uint32_t n) {
  command();
  wait_idle(l);
  host_.evict(l, k, v, n);
  device_.evict(l, k, v, n);
}

void FakeDevice::truncate(uint32_t l, uint32_t sink, uint32_t window) {
  command();
  wait_idle(l);
  host_.truncate(l, sink, window);
  device_.truncate(l, sink, window);
}

void FakeDevice::attend_begin(uint32_t l, const float* q, gpu::Codes* codes) {
  command();
  device_.attend_begin(l, q);
  for (uint32_t h = 0; h < shape_.kv_heads; ++h) device_.run_host_task(h);
  host_codes_ = static_cast<FakeCodes*>(codes);
  host_layer_ = l;
  host_q_ = q;
}

void FakeDevice::attend_end(StateView out) {
  command();
  device_.attend_end(out);
  if (host_codes_ == nullptr) return;
  const uint32_t group = shape_.q_heads / shape_.kv_heads;
  const size_t size = size_t{group} * shape_.head_dim;
  std::vector<float> o(2 * size), lse(2 * group);
  for (uint32_t h = 0; h < shape_.kv_heads; ++h) {
    const StateView state{out.o + h * size, out.lse + h * group};
    std::copy_n(state.o, size, o.data());
    std::copy_n(state.lse, group, lse.data());
    const std::array<StateView, 2> states{StateView{o.data(), lse.data()},
                                          StateView{o.data() + size, lse.data() + group}};
    host_codes_->run(host_layer_, h, host_q_ + h * size, group, states[1]);
    cpu::merge_states(states, group, shape_.head_dim, state);
  }
}

void FakeDevice::begin(uint32_t layer, const TensorView& q, const TensorView* k,
                       const TensorView* v, const gpu::OnDevice& tokens, gpu::Stream) {
  count_begun();
  Launch launch{
      layer, q, {}, {}, k != nullptr, static_cast<FakeCodes*>(tokens.codes), tokens.keeps_answer};
  if (tokens.keeps_answer && !shape_.keeps_answers) {
    throw Error(Status::invalid_argument, "planted: there is no memory for answers");
  }
  if (tokens.keeps_answer) faults_->answers_kept += 1;
  if (k != nullptr) {
    launch.k = *k;
    launch.v = *v;
  }
  stream_->push([this, launch] { run_first_half(launch); });
}

void FakeDevice::end(uint32_t layer, const TensorOut& out, float* lse, gpu::Stream) {
  command();
  if (faults_->fails_to_end) throw Error(Status::device_error, "planted: a launch failed");
  stream_->push([this, layer, out, lse] { run_second_half(layer, out, lse); });
}

void FakeDevice::step(uint32_t layer, const TensorView& q, const TensorView* k, const TensorView* v,
                      const gpu::OnDevice& tokens, const TensorOut& out, float* lse,
                      gpu::Stream stream) {
  if (tokens.group != nullptr && tokens.codes != nullptr && !tokens.keeps_answer) {
    count_begun();
    const Launch launch{layer,
                        q,
                        k == nullptr ? q : *k,
                        v == nullptr ? q : *v,
                        k != nullptr,
                        static_cast<FakeCodes*>(tokens.codes),
                        false};
    static_cast<FakeStepGroup*>(tokens.group)->add([this, launch, out, lse] {
      stream_->push([this, launch] { run_first_half(launch); });
      stream_->push([this, layer = launch.layer, out, lse] { run_second_half(layer, out, lse); });
    });
    return;
  }
  begin(layer, q, k, v, tokens, stream);
  end(layer, out, lse, stream);
}

std::unique_ptr<gpu::StepGroup> FakeDevice::make_group(uint32_t) {
  return std::make_unique<FakeStepGroup>(*faults_);
}

void FakeDevice::step_tokens(uint32_t layer, const gpu::ManyTokens& tokens, gpu::Codes& codes,
                             gpu::Stream) {
  count_begun();
  faults_->steps_of_tokens += 1;
  const auto push = [this, layer, tokens, &codes] {
    stream_->push([this, layer, tokens, &codes] {
      run_tokens(layer, tokens, static_cast<FakeCodes&>(codes));
    });
  };
  if (tokens.group != nullptr) return static_cast<FakeStepGroup*>(tokens.group)->add(push);
  push();
}

void FakeDevice::keep_newest(std::span<const uint32_t> layers, uint32_t of,
                             std::span<const uint32_t> kept, gpu::Stream) {
  command();
  stream_->push([this, layers = std::vector<uint32_t>(layers.begin(), layers.end()), of,
                 kept = std::vector<uint32_t>(kept.begin(), kept.end())] {
    for (const uint32_t layer : layers) keep(device_, layer, of, kept);
  });
}

void FakeDevice::keep_newest_of_copy(uint32_t layer, uint32_t of, std::span<const uint32_t> kept) {
  keep(host_, layer, of, kept);
}

bool FakeDevice::await(uint32_t layer, uint32_t sequence, uint32_t, uint64_t timeout_us,
                       const std::atomic<bool>& stop, gpu::Published& out) {
  Layer& l = layers_[layer];
  if (timeout_us != 0) {
    awaited_ += 1;
    faults_->on_await();
  }
  if (!wait_for(l.published, sequence, timeout_us, stop)) return false;
  const Rows& rows = l.rows[sequence % 2];
  out = {rows.q.data(), rows.k.data(), rows.v.data()};
  return true;
}

StateView FakeDevice::host_slot(uint32_t layer, uint32_t kv_head) {
  const uint32_t group = shape_.q_heads / shape_.kv_heads;
  Layer& l = layers_[layer];
  return {l.o.data() + size_t{kv_head} * group * shape_.head_dim, l.lse.data() + kv_head * group};
}

void FakeDevice::deliver(uint32_t layer, uint32_t kv_head, uint32_t sequence) {
  if (faults_->stalls && kv_head == 0) return;
  layers_[layer].delivered[kv_head].store(sequence, std::memory_order_release);
}

void FakeDevice::give_up(uint32_t layer, uint32_t sequence) {
  layers_[layer].given_up.store(sequence, std::memory_order_release);
}

bool FakeDevice::answer(uint32_t layer, uint32_t kv_head, uint32_t sequence, StateView& out) {
  Layer& l = layers_[layer];
  if (!shape_.keeps_answers || !reached(l.answered.load(std::memory_order_acquire), sequence)) {
    return false;
  }
  const uint32_t group = shape_.q_heads / shape_.kv_heads;
  Answer& a = l.answers[sequence % 2];
  out = {a.o.data() + size_t{kv_head} * group * shape_.head_dim, a.lse.data() + kv_head * group};
  return true;
}

KvPieces FakeDevice::host_copy(uint32_t layer) {
  // In two pieces, as if a ring's.
  const uint32_t n = host_.sink_count(layer) + host_.window_count(layer);
  copy_k_.resize(n * token_bytes());
  copy_v_.resize(copy_k_.size());
  host_.read(layer, copy_k_.data(), copy_v_.data());
  const auto rows = [&](const std::vector<std::byte>& all) {
    return RowsView{dense_tensor(all.data(), n, shape_.kv_heads, shape_.head_dim, shape_.dtype)};
  };
  return in_two_pieces({rows(copy_k_), rows(copy_v_)});
}

KvPieces FakeDevice::in_two_pieces(const KvView& rows) {
  KvPieces all;
  const size_t n = rows.keys.tokens;
  if (n >= 3) all.pieces[all.count++] = rows.slice(0, n / 3);
  if (n != 0) all.pieces[all.count++] = rows.slice(n / 3, n - n / 3);
  return all;
}

uint32_t FakeDevice::update_host_copy(uint32_t layer, const gpu::Published& p, std::byte* k,
                                      std::byte* v) {
  return take_in(host_, layer, p.k, p.v, k, v);
}

KvPieces FakeDevice::device_rows(uint32_t layer) {
  // In two pieces, as if a ring's; `[kv_heads][n, head_dim]` of both K and V.
  const uint32_t n = device_.sink_count(layer) + device_.window_count(layer);
  std::vector<std::byte> k(n * token_bytes()), v(k.size());
  device_.read(layer, k.data(), v.data());
  const size_t row = shape_.head_dim * dtype_size(shape_.dtype);
  pieces_.assign(2 * k.size(), std::byte{});
  for (uint32_t h = 0; h < shape_.kv_heads; ++h) {
    for (uint32_t t = 0; t < n; ++t) {
      const size_t to = (size_t{h} * n + t) * row, from = t * token_bytes() + h * row;
      std::copy_n(k.data() + from, row, pieces_.data() + to);
      std::copy_n(v.data() + from, row, pieces_.data() + k.size() + to);
    }
  }
  const auto rows = [&](size_t at) {
    return RowsView{{.data = pieces_.data() + at,
                     .token_stride = shape_.head_dim,
                     .head_stride = ptrdiff_t{n} * shape_.head_dim,
                     .tokens = n,
                     .heads = shape_.kv_heads,
                     .dim = shape_.head_dim,
                     .dtype = shape_.dtype,
                     .memory = Memory::device}};
  };
  return in_two_pieces({rows(0), rows(k.size())});
}

void FakeDevice::synchronize(gpu::Stream) {
  stream_->synchronize();
  command();
}

Status FakeDevice::failure(std::string& text) {
  const std::lock_guard lock(mutex_);
  text = std::exchange(failure_text_, {});
  return std::exchange(failure_, Status::ok);
}

void FakeDevice::note_failure(Status status, const std::string& text) {
  const std::lock_guard lock(mutex_);
  failure_ = status;
  failure_text_ = text;
}

size_t FakeDevice::token_bytes() const {
  return size_t{shape_.kv_heads} * shape_.head_dim * dtype_size(shape_.dtype);
}

void FakeDevice::count_begun() {
  if (stream_->capture_id() == 0) begun_ += 1;
  if (faults_->fails) {
    // Not before the host, which was told of the step, waits for it.
    while (awaited_ < begun_) std::this_thread::yield();
    throw Error(Status::device_error, "planted: a launch failed");
  }
  command();
}

bool FakeDevice::reached(uint32_t value, uint32_t wanted) {
  return static_cast<int32_t>(value - wanted) >= 0;
}

bool FakeDevice::wait_for(const std::atomic<uint32_t>& flag, uint32_t wanted, uint64_t timeout_us,
                          const std::atomic<bool>& stop) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(timeout_us);
  while (!reached(flag.load(std::memory_order_acquire), wanted)) {
    if (stop.load() || std::chrono::steady_clock::now() > end) return false;
    std::this_thread::yield();
  }
  return true;
}

uint32_t FakeDevice::take_in(runtime::HostDevice& device, uint32_t layer, const std::byte* tk,
                             const std::byte* tv, std::byte* k, std::byte* v) {
  if (device.sink_count(layer) < shape_.sink) {
    device.append_sink(layer, tk, tv, 1);
    return 0;
  }
  uint32_t left = 0;
  if (device.window_count(layer) == shape_.window_capacity) {
    left = shape_.window_capacity - (shape_.window - 1);
    device.evict(layer, k, v, left);
  }
  device.append_window(layer, tk, tv, 1);
  return left;
}

void FakeDevice::keep(runtime::HostDevice& device, uint32_t layer, uint32_t of,
                      std::span<const uint32_t> kept) const {
  const uint32_t sink = device.sink_count(layer), window = device.window_count(layer);
  const uint32_t first = sink + window - of;
  std::vector<std::byte> k((sink + window) * token_bytes()), v(k.size());
  device.read(layer, k.data(), v.data());
  device.truncate(layer, std::min(sink, first), first - std::min(sink, first));
  for (const uint32_t number : kept) {
    const size_t at = (first + number) * token_bytes();
    if (device.sink_count(layer) < shape_.sink) {
      device.append_sink(layer, k.data() + at, v.data() + at, 1);
    } else {
      device.append_window(layer, k.data() + at, v.data() + at, 1);
    }
  }
}

}  // namespace keyhole::test
