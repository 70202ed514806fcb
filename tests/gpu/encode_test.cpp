// Encoding on the device against encode_block() of the host, bit for bit; the life of a Codes; pinned ranges.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "gpu/cuda/codes/codes_kernels.h"
#include "gpu/cuda/codes/encode.h"
#include "tests/gpu/codes_fixture.h"

namespace keyhole::gpu::test {
namespace {

struct Stuff {
  explicit Stuff(const CodesShape& s, size_t limit = 0) : shape(s) {
    ResidentShape r;
    r.layers = s.layers;
    r.q_heads = s.q_heads;
    r.kv_heads = s.kv_heads;
    r.head_dim = s.code.dim;
    r.dtype = s.dtype == DType::i8 ? DType::f16 : s.dtype;
    r.sink = 4;
    r.window_capacity = 8;
    r.window = 8;
    r.logits = s.logits;
    CudaConfig config;
    config.probe_signal = false;
    resident = make_cuda_resident(r, config, limit == 0 ? 0 : cuda_resident_bytes(r) + limit);
  }
  CodesShape shape;
  std::unique_ptr<Resident> resident;
};

CodesShape shape_of(uint32_t dim, uint32_t bits, DType dtype, uint32_t blocks) {
  CodesShape s;
  s.layers = 2;
  s.kv_heads = 2;
  s.q_heads = 4;
  s.code = {dim, bits, bits};
  s.dtype = dtype;
  s.blocks = blocks;
  s.logits.scale = 1.0F / std::sqrt(static_cast<float>(dim));
  return s;
}

enum class Kind { normal, zeros, equal, huge, tiny, outliers, beyond };

/// A row of all heads.
std::vector<float> strange(std::mt19937& rng, size_t n, Kind kind) {
  std::vector<float> x = random_floats(rng, n);
  for (size_t i = 0; i < n; ++i) {
    switch (kind) {
      case Kind::normal: break;
      case Kind::zeros: x[i] = 0.0F; break;
      case Kind::equal: x[i] = static_cast<float>(i % 7) - 2.5F; break;
      case Kind::huge: x[i] *= 5000.0F; break;
      case Kind::tiny: x[i] *= 1e-6F; break;
      case Kind::outliers: x[i] *= i % 16 == 3 ? 100.0F : 1.0F; break;
      case Kind::beyond: x[i] *= i % 16 == 3 ? 1e12F : 1.0F; break;
    }
  }
  return x;
}

void expect_equal(const std::byte* seen, const OffloadedLayer& rows, const CodesShape& shape,
                  uint32_t kv_head, uint32_t block) {
  const size_t bytes = shape.code.block_bytes();
  const auto at = std::mismatch(seen, seen + bytes, rows.codes(kv_head).block(block)).first - seen;
  ASSERT_EQ(static_cast<size_t>(at), bytes) << "KV head " << kv_head << ", block " << block;
}

/// What is kept of the heads' rows. beyond: of the last three blocks, keys of two and values of two do not fit fp16.
void expect_figures(const DeviceBuffer& figures, const DeviceBuffer& arrivals,
                    const OffloadedLayer& rows, const CodesShape& shape, uint32_t blocks,
                    bool beyond) {
  const auto seen = download(figures.as<CodeFigures>(), shape.kv_heads);
  const auto left = download(arrivals.as<uint32_t>(), arrivals.bytes() / 4);
  EXPECT_EQ(left, std::vector<uint32_t>(left.size(), 0));
  for (uint32_t h = 0; h < shape.kv_heads; ++h) {
    float widest = 0.0F;
    double sum = 0.0;
    uint32_t unknown = 0;
    for (uint32_t b = 0; b < blocks; ++b) {
      const index::CodeRun run = rows.codes(h).run(b);
      if (run.noise == kUnknownNoise) {
        ++unknown;
        continue;
      }
      const float f = index::widest_factor(run);
      widest = std::max(widest, f * f * run.noise);
      double squares = 0.0;
      for (uint32_t i = 0; i < kCodeBlock; ++i) {
        const double factor = double{index::CodeRunReader(shape.code, run).key_factor(i)};
        squares += factor * factor;
      }
      sum += squares / kCodeBlock * double{run.noise};
    }
    float seen_widest;
    std::memcpy(&seen_widest, &seen[h].widest, 4);
    EXPECT_EQ(unknown, beyond ? 3U : 0U);
    EXPECT_EQ(seen_widest, beyond ? INFINITY : widest);
    // Where values alone do not fit, keys count.
    EXPECT_EQ(seen[h].blocks, blocks - (beyond ? 2 : 0));
    const double seen_sum = static_cast<double>(seen[h].noise_sum) * double{kNoiseUnit};
    if (beyond) {
      EXPECT_GE(seen_sum, sum * 0.999);
    } else {
      EXPECT_NEAR(seen_sum, sum, sum * 1e-4 + blocks * double{kNoiseUnit});
    }
  }
}

struct EncodeCase {
  uint32_t dim, bits;
  DType dtype;
};

class Encode : public testing::TestWithParam<EncodeCase> {};

TEST_P(Encode, MakesTheBitsOfTheHost) {
  const EncodeCase c = GetParam();
  KEYHOLE_NEEDS_GPU();
  constexpr uint32_t kBlocks = 10, kLearned = 7;
  const CodesShape shape = shape_of(c.dim, c.bits, c.dtype, kBlocks);
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 rng(seed);
  OffloadedLayer rows(shape, kBlocks * kCodeBlock + 8);
  const size_t row = size_t{shape.kv_heads} * c.dim;
  const Kind kinds[kLearned] = {Kind::normal, Kind::zeros,    Kind::equal, Kind::huge,
                                Kind::tiny,   Kind::outliers, Kind::normal};
  const auto append = [&](Kind of_keys, Kind of_values) {
    for (uint32_t i = 0; i < kCodeBlock; ++i) {
      rows.append(strange(rng, row, of_keys), strange(rng, row, of_values));
    }
  };
  for (const Kind kind : kinds) append(kind, kind);
  rows.learn(random_floats(rng, size_t{shape.q_heads} * c.dim));
  // Rows that the balance did not foretell, where their dtype can hold them.
  const Kind beyond = c.dtype == DType::f16 ? Kind::normal : Kind::beyond;
  append(beyond, Kind::normal);
  append(Kind::normal, beyond);
  append(beyond, beyond);
  rows.extend();

  std::vector<float> key_scale, value_scale;
  for (uint32_t h = 0; h < shape.kv_heads; ++h) {
    const index::Balance& balance = rows.codes(h).balance();
    key_scale.insert(key_scale.end(), balance.key_scale.begin(), balance.key_scale.end());
    value_scale.push_back(balance.value_scale);
  }
  const auto on_device = [](const std::vector<float>& x) {
    DeviceBuffer there(x.size() * sizeof(float));
    check(cudaMemcpy(there.data(), x.data(), there.bytes(), cudaMemcpyHostToDevice), "scales");
    return there;
  };
  const DeviceBuffer keys = on_device(key_scale), values = on_device(value_scale);
  EncodeParams p;
  p.shape = shape.code;
  p.dtype = shape.dtype;
  p.kv_heads = shape.kv_heads;
  p.keys = rows.keys();
  p.values = rows.values();
  p.rows_stride = rows.head_stride();
  p.key_scale = keys.as<float>();
  p.value_scale = values.as<float>();
  p.head_stride = shape.code.block_bytes();
  p.block_stride = shape.kv_heads * p.head_stride;
  const DeviceBuffer blocks(kBlocks * p.block_stride);
  check(cudaMemset(blocks.data(), 0xa5, blocks.bytes()), "poison");
  p.blocks = blocks.data();
  const size_t copied = shape.dtype == DType::i8 ? kBlocks * rows.block_scales() : 0;
  const DeviceBuffer row_scales((copied + 1) * sizeof(uint16_t));
  p.row_scales = rows.scales();
  p.row_scales_out = row_scales.as<uint16_t>();
  const size_t heads = shape.kv_heads;
  const DeviceBuffer figures(heads * sizeof(CodeFigures)), arrivals(kBlocks * heads * 4);
  for (const DeviceBuffer* zero : {&figures, &arrivals}) {
    check(cudaMemset(zero->data(), 0, zero->bytes()), "zeros");
  }
  p.figures = figures.as<CodeFigures>();
  p.arrivals = arrivals.as<uint32_t>();
  const EncodeLauncher launcher(shape.code, shape.dtype);
  for (uint32_t first : {0U, 4U}) {
    p.first = first;
    p.count = first == 0 ? 4 : kBlocks - 4;
    launcher.launch(p, nullptr);
  }
  const auto seen = download(blocks.data(), blocks.bytes());
  for (uint32_t h = 0; h < shape.kv_heads; ++h) {
    for (uint32_t b = 0; b < kBlocks; ++b) {
      expect_equal(seen.data() + b * p.block_stride + h * p.head_stride, rows, shape, h, b);
    }
  }
  expect_figures(figures, arrivals, rows, shape, kBlocks, beyond == Kind::beyond);
  std::vector<uint16_t> seen_scales(copied);
  check(cudaMemcpy(seen_scales.data(), row_scales.data(), copied * sizeof(uint16_t),
                   cudaMemcpyDeviceToHost),
        "scales of rows");
  EXPECT_TRUE(std::equal(seen_scales.begin(), seen_scales.end(), rows.scales()));
}

std::vector<EncodeCase> encode_cases() {
  std::vector<EncodeCase> cases;
  for (uint32_t dim : {64U, 80U, 96U, 128U, 256U, 512U}) {
    for (uint32_t bits : {2U, 4U}) {
      for (DType dtype : {DType::f16, DType::bf16, DType::f32, DType::i8}) {
        cases.push_back({dim, bits, dtype});
      }
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Shapes, Encode, testing::ValuesIn(encode_cases()), [](const auto& c) {
  return std::to_string(c.param.dim) + "_" + std::to_string(c.param.bits) + "_" +
         dtype_name(c.param.dtype);
});

TEST(CodesShapes, ThatAreSupportedHaveKernels) {
  for (uint32_t dim : {64U, 80U, 96U, 128U, 256U, 512U}) {
    for (uint32_t key_bits : {1U, 2U, 4U}) {
      for (uint32_t value_bits : {0U, 1U, 2U, 4U}) {
        for (uint32_t group : {1U, 3U, 4U, 8U, 12U, 16U}) {
          CodesShape shape = shape_of(dim, key_bits, DType::f16, 1);
          shape.code.value_bits = value_bits;
          shape.q_heads = shape.kv_heads * group;
          EXPECT_EQ(codes_supported(shape), codes_have_kernels(shape.code, group))
              << dim << " components, " << key_bits << " and " << value_bits << " bits";
        }
      }
    }
  }
}

TEST(CodesShapes, WithoutKernelsAreRefused) {
  KEYHOLE_NEEDS_GPU();
  CodesShape shape = shape_of(128, 2, DType::f16, 1);
  const Stuff stuff(shape);
  for (const auto& [key_bits, value_bits] :
       {std::pair(1U, 1U), std::pair(2U, 4U), std::pair(4U, 0U)}) {
    shape.code.key_bits = key_bits;
    shape.code.value_bits = value_bits;
    try {
      (void)make_cuda_codes(*stuff.resident, shape);
      ADD_FAILURE() << "codes of " << key_bits << " and " << value_bits << " bits";
    } catch (const Error& e) {
      EXPECT_EQ(e.status(), Status::unsupported) << e.what();
      EXPECT_EQ(e.what(), "codes on a CUDA device: " + why_no_codes(shape));
    }
  }
}

/// dtype, and whether rows are not pinned.
class CodesBlocks : public testing::TestWithParam<std::tuple<DType, bool>> {};

TEST_P(CodesBlocks, ComeGoAndAreReplaced) {
  KEYHOLE_NEEDS_GPU();
  CodesShape shape = shape_of(128, 2, std::get<0>(GetParam()), 9);
  shape.rows_by_host = std::get<1>(GetParam());
  std::mt19937 rng(5);
  const Stuff stuff(shape);
  const auto codes = make_cuda_codes(*stuff.resident, shape);
  EXPECT_EQ(codes->bytes(), codes_bytes(shape));
  OffloadedLayer rows(shape, 9 * kCodeBlock);
  const size_t row = size_t{shape.kv_heads} * shape.code.dim;
  for (uint32_t i = 0; i < 9 * kCodeBlock; ++i) {
    rows.append(random_floats(rng, row), random_floats(rng, row));
  }
  rows.learn(random_floats(rng, size_t{shape.q_heads} * shape.code.dim));
  rows.tell(*codes, 1);
  rows.extend();
  std::vector<std::byte> seen(shape.code.block_bytes());
  const auto expect_blocks = [&](uint32_t count) {
    EXPECT_EQ(codes->count(1), count);
    for (uint32_t h = 0; h < shape.kv_heads; ++h) {
      for (uint32_t b = 0; b < count; ++b) {
        codes->read(1, h, b, seen.data());
        expect_equal(seen.data(), rows, shape, h, b);
      }
    }
  };
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  codes->encode(1, 0, 2, stream);
  codes->encode(1, 2, 7, stream);
  EXPECT_EQ(codes->count(0), 0U);
  expect_blocks(9);
  for (uint32_t i = 2 * kCodeBlock; i < 4 * kCodeBlock; ++i) {
    rows.write(i, random_floats(rng, row, 0.3F), random_floats(rng, row, 7.0F));
  }
  codes->encode(1, 2, 2, stream);
  rows.cut(2 * kCodeBlock);
  rows.uncut(4 * kCodeBlock);
  rows.extend();
  expect_blocks(4);
  codes->truncate(1, 1, stream);
  expect_blocks(1);
  EXPECT_THROW(codes->read(1, 0, 1, seen.data()), Error);
  EXPECT_THROW(codes->encode(1, 2, 1, stream), Error);  // a hole
  EXPECT_THROW(codes->encode(1, 1, 9, stream), Error);  // beyond the capacity
  EXPECT_THROW(codes->encode(0, 0, 1, stream), Error);  // no rows
  EXPECT_THROW(codes->truncate(1, 2, stream), Error);
  ASSERT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

INSTANTIATE_TEST_SUITE_P(DTypes, CodesBlocks,
                         testing::Combine(testing::Values(DType::bf16, DType::f32, DType::i8),
                                          testing::Bool()),
                         [](const auto& c) {
                           return std::string(dtype_name(std::get<0>(c.param))) +
                                  (std::get<1>(c.param) ? "_copied" : "_pinned");
                         });

TEST(CodesOfSomeLayers, TakeTheMemoryOfThese) {
  KEYHOLE_NEEDS_GPU();
  CodesShape shape = shape_of(64, 4, DType::f16, 2);
  shape.layers = 5;
  shape.coded_layers = 2;
  std::mt19937 rng(6);
  const Stuff stuff(shape);
  const auto codes = make_cuda_codes(*stuff.resident, shape);
  EXPECT_EQ(codes->bytes(), codes_bytes(shape));
  const size_t row = size_t{shape.kv_heads} * shape.code.dim;
  OffloadedLayer first(shape, 2 * kCodeBlock), second(shape, 2 * kCodeBlock);
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  for (const auto& [rows, layer] : {std::pair(&first, 4U), std::pair(&second, 1U)}) {
    for (uint32_t i = 0; i < 2 * kCodeBlock; ++i) {
      rows->append(random_floats(rng, row), random_floats(rng, row));
    }
    rows->learn(random_floats(rng, size_t{shape.q_heads} * shape.code.dim));
    rows->tell(*codes, layer);
    rows->extend();
    codes->encode(layer, 0, 2, stream);
  }
  std::vector<std::byte> seen(shape.code.block_bytes());
  for (const auto& [rows, layer] : {std::pair(&first, 4U), std::pair(&second, 1U)}) {
    for (uint32_t b = 0; b < 2; ++b) {
      codes->read(layer, 1, b, seen.data());
      expect_equal(seen.data(), *rows, shape, 1, b);
    }
  }
  EXPECT_EQ(codes->count(0), 0U);
  EXPECT_THROW(codes->set_rows(0, first.all()), Error);
  EXPECT_THROW(codes->encode(0, 0, 1, stream), Error);
  EXPECT_THROW(codes->truncate(0, 0, stream), Error);
  EXPECT_THROW((void)codes->count(5), Error);
  ASSERT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

TEST(CodesMemory, CountsAgainstTheLimit) {
  KEYHOLE_NEEDS_GPU();
  const CodesShape shape = shape_of(128, 2, DType::f16, 512);
  const size_t bytes = codes_bytes(shape);
  const Stuff enough(shape, bytes);
  (void)make_cuda_codes(*enough.resident, shape);  // gives its memory back
  const auto held = make_cuda_codes(*enough.resident, shape);
  try {
    (void)make_cuda_codes(*enough.resident, shape);
    ADD_FAILURE() << "memory that was taken";
  } catch (const Error& e) {
    EXPECT_EQ(e.status(), Status::out_of_device_memory) << e.what();
    EXPECT_NE(std::string(e.what()).find(std::to_string(bytes)), std::string::npos) << e.what();
  }
  const Stuff little(shape, bytes - 1);
  EXPECT_THROW((void)make_cuda_codes(*little.resident, shape), Error);
  CodesShape other = shape;
  other.q_heads = 8;
  EXPECT_THROW((void)make_cuda_codes(*enough.resident, other), Error);
}

TEST(CodesMemory, BalancesAndRowsAreChecked) {
  KEYHOLE_NEEDS_GPU();
  const CodesShape shape = shape_of(64, 2, DType::f16, 1);
  const Stuff stuff(shape);
  const auto codes = make_cuda_codes(*stuff.resident, shape);
  std::vector<float> scale(64, 1.0F);
  codes->set_balance(0, 0, scale.data(), 1.0F);
  EXPECT_THROW(codes->set_balance(0, 0, scale.data(), 0.0F), Error);
  EXPECT_THROW(codes->set_balance(2, 0, scale.data(), 1.0F), Error);
  EXPECT_THROW(codes->set_balance(0, 2, scale.data(), 1.0F), Error);
  scale[63] = INFINITY;
  EXPECT_THROW(codes->set_balance(0, 0, scale.data(), 1.0F), Error);
  const Pages pages(4096);
  // Heads are 64 bytes apart.
  const RowsView rows{{.data = pages.data(),
                       .token_stride = 64,
                       .head_stride = 32,
                       .heads = 2,
                       .dim = 64,
                       .dtype = DType::f16}};
  codes->set_rows(0, {rows, rows});
  RowsView other = rows;
  other.data += 8;
  EXPECT_THROW(codes->set_rows(0, {other, rows}), Error);
  other = rows;
  other.head_stride = 36;
  EXPECT_THROW(codes->set_rows(0, {other, rows}), Error);
  const uint16_t scales[1] = {};
  other = rows;
  other.scales.data = scales;
  EXPECT_THROW(codes->set_rows(0, {other, rows}), Error);  // of int8 alone
}

/// What the device reads at `data`.
std::vector<std::byte> seen_by_device(const std::byte* data, size_t bytes) {
  const DeviceBuffer there(bytes);
  check(cudaMemcpy(there.data(), data, bytes, cudaMemcpyDefault), "from pinned memory");
  std::vector<std::byte> back(bytes);
  check(cudaMemcpy(back.data(), there.data(), bytes, cudaMemcpyDeviceToHost), "back");
  return back;
}

bool is_pinned(const std::byte* data) {
  cudaPointerAttributes attributes{};
  check(cudaPointerGetAttributes(&attributes, data), "attributes");
  return attributes.type == cudaMemoryTypeHost && attributes.devicePointer == data;
}

TEST(Pins, RangesComeAndGo) {
  KEYHOLE_NEEDS_GPU();
  const Pages pages(16 * kPinAlignment), others(4 * kPinAlignment);
  const auto page = [&](size_t i) { return pages.data() + i * kPinAlignment; };
  {
    HostPin pin;
    pin.add(page(0), 2 * kPinAlignment);
    pin.add(page(2), kPinAlignment);
    pin.add(page(8), 4 * kPinAlignment);
    pin.add(others.data(), 0);
    EXPECT_EQ(pin.bytes(), 7 * kPinAlignment);
    for (size_t i : {0, 1, 2, 8, 11}) EXPECT_TRUE(is_pinned(page(i))) << i;
    for (size_t i : {3, 7, 12}) EXPECT_FALSE(is_pinned(page(i))) << i;
    EXPECT_THROW(pin.add(page(1), kPinAlignment), Error);
    EXPECT_THROW(pin.add(page(7), 2 * kPinAlignment), Error);
    EXPECT_THROW(pin.add(page(9), kPinAlignment), Error);
    EXPECT_THROW(pin.add(page(4) + 16, kPinAlignment), Error);
    EXPECT_THROW(pin.add(page(4), 100), Error);
    EXPECT_EQ(pin.bytes(), 7 * kPinAlignment);
    pages.data()[2 * kPinAlignment + 17] = std::byte{42};
    EXPECT_EQ(seen_by_device(page(2), kPinAlignment)[17], std::byte{42});
    pin.drop(page(2), page(3));
    EXPECT_FALSE(is_pinned(page(2)));
    EXPECT_TRUE(is_pinned(page(8)));
    pin.add(page(2), kPinAlignment);
    pin.drop(page(1), nullptr);
    EXPECT_EQ(pin.bytes(), 2 * kPinAlignment);
    EXPECT_TRUE(is_pinned(page(0)));
    EXPECT_FALSE(is_pinned(page(8)));
  }
  EXPECT_FALSE(is_pinned(page(0)));
}

TEST(Pins, WorkBesideACapture) {
  KEYHOLE_NEEDS_GPU();
  const Pages pages(2 * kPinAlignment);
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  std::thread([&] {
    HostPin pin;
    pin.add(pages.data(), kPinAlignment);
    pin.drop(pages.data(), nullptr);
    pin.add(pages.data(), 2 * kPinAlignment);
  }).join();
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

TEST(Pins, NeedADevice) {
  KEYHOLE_NEEDS_GPU();
  EXPECT_THROW(HostPin(1000), Error);
}

}  // namespace
}  // namespace keyhole::gpu::test
