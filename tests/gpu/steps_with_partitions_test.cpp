// Steps with partitions on the device: what the device attends for the host, and what the host attends for those
// that were chosen, add up to all partitions, whatever was chosen.
#include <algorithm>
#include <atomic>
#include <thread>

#include "tests/gpu/cuda_fixture.h"

namespace keyhole::gpu::test {
namespace {

constexpr uint32_t kPartitions = 50;

/// Partitions of all heads of a layer: a token each, which counts `sizes` times.
struct HostPartitions {
  std::vector<Token> tokens;
  std::vector<float> sizes;

  HostPartitions(std::mt19937& rng, const ResidentShape& s, Partitions& device, uint32_t layer) {
    sizes.resize(kPartitions);
    for (float& n : sizes) n = static_cast<float>(1 + rng() % 5);
    tokens = random_tokens(rng, s, kPartitions);
    // One value for all of a head: the device leaves out values of partitions far below the mean weight, and what
    // is asked here is whether the parts add up.
    for (Token& t : tokens) t.v = tokens[0].v;
    const std::vector<float> center(s.head_dim, 0.25F), scales(s.head_dim, 1.0F / 64),
        variances(kPartitions, 0.5F);
    for (uint32_t h = 0; h < s.kv_heads; ++h) {
      std::vector<int8_t> codes;
      std::vector<float> values;
      for (Token& t : tokens) {
        for (uint32_t d = 0; d < s.head_dim; ++d) {
          codes.push_back(static_cast<int8_t>(static_cast<int>(rng() % 255) - 127));
          t.k[size_t{h} * s.head_dim + d] = 0.25F + static_cast<float>(codes.back()) / 64;
          values.push_back(t.v[size_t{h} * s.head_dim + d]);
        }
      }
      const auto rows = as_bytes(values, s.dtype);
      device.upload(layer, h, 0,
                    {.count = kPartitions,
                     .keys = codes.data(),
                     .scales = scales.data(),
                     .center = center.data(),
                     .sizes = sizes.data(),
                     .variances = variances.data(),
                     .values = rows.data()});
      device.set(layer, h, h == 0 ? 0 : 7, PartitionsTail::centroid);
    }
  }
  void add_to(Truth& truth, uint32_t i) const {
    for (float n = 0; n < sizes[i]; ++n) truth.sink.push_back(tokens[i]);
  }
};

void run(bool as_graph) {
  ResidentShape shape = small_shape(128, DType::f16, 4);
  std::mt19937 rng(41);
  const auto resident = make_cuda_resident(shape, {});
  StreamSteps& steps = *resident->stream_steps();
  if (steps.signal() != Signal::device_wait) GTEST_SKIP() << "kernels are launched one at a time";
  PartitionsShape partitions_shape;
  partitions_shape.layers = shape.layers;
  partitions_shape.q_heads = shape.q_heads;
  partitions_shape.kv_heads = shape.kv_heads;
  partitions_shape.head_dim = shape.head_dim;
  partitions_shape.dtype = shape.dtype;
  partitions_shape.partitions = 64;
  partitions_shape.most_chosen = 16;
  partitions_shape.logits = shape.logits;
  const auto device = make_cuda_partitions(*resident, partitions_shape);
  std::vector<HostPartitions> partitions;
  for (uint32_t layer = 0; layer < shape.layers; ++layer) {
    partitions.emplace_back(rng, shape, *device, layer);
  }

  const uint32_t group = 4;
  const uint32_t steps_of_test = 6;
  std::atomic<uint32_t> served{0};
  std::thread host([&] {
    const std::atomic<bool> stop{false};
    std::vector<std::byte> k(shape.window_capacity * size_t{512}), v(k.size());
    for (uint32_t sequence = 1; sequence <= steps_of_test; ++sequence) {
      for (uint32_t layer = 0; layer < shape.layers; ++layer) {
        Published published;
        if (!steps.await(layer, sequence, 100, 10'000'000, stop, published)) return;
        const std::vector<float> q(published.q, published.q + shape.q_heads * shape.head_dim);
        for (uint32_t h = 0; h < shape.kv_heads; ++h) {
          Chosen chosen;
          if (!steps.chosen(layer, h, sequence, 10'000'000, stop, chosen)) return;
          EXPECT_EQ(chosen.count, h == 0 ? 0U : 7U);
          Truth read(shape);
          for (uint32_t i = 0; i < chosen.count; ++i) {
            EXPECT_LT(chosen.ids[i], kPartitions);
            EXPECT_TRUE(i == 0 || chosen.ids[i - 1] < chosen.ids[i]);
            partitions[layer].add_to(read, chosen.ids[i]);
          }
          const States states = read.attend(q);
          const StateView slot = steps.host_slot(layer, h);
          for (uint32_t g = 0; g < group; ++g) {
            slot.lse[g] = static_cast<float>(states.lse[h * group + g]);
            for (uint32_t d = 0; d < shape.head_dim; ++d) {
              slot.o[size_t{g} * shape.head_dim + d] =
                  static_cast<float>(states.o[(size_t{h} * group + g) * shape.head_dim + d]);
            }
          }
          steps.deliver(layer, h, sequence);
        }
        steps.update_host_copy(layer, published, k.data(), v.data());
        ++served;
      }
    }
  });

  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  DeviceArray q(shape.q_heads, shape.head_dim, DType::f16);
  DeviceArray k(shape.kv_heads, shape.head_dim, DType::f16);
  DeviceArray v(shape.kv_heads, shape.head_dim, DType::f16);
  std::vector<DeviceArray> out, lse;
  for (uint32_t layer = 0; layer < shape.layers; ++layer) {
    out.emplace_back(shape.q_heads, shape.head_dim, DType::f32);
    lse.emplace_back(1, shape.q_heads, DType::f32);
  }
  const auto enqueue = [&] {
    const DeviceRows new_k = k.rows(), new_v = v.rows();
    for (uint32_t layer = 0; layer < shape.layers; ++layer) {
      if (layer == 0) {
        steps.begin(layer, q.rows(), &new_k, &new_v, {.partitions = device.get()}, stream);
        steps.end(layer, out[layer].rows(), lse[layer].floats(), stream);
      } else {
        steps.step(layer, q.rows(), &new_k, &new_v, {.partitions = device.get()}, out[layer].rows(),
                   lse[layer].floats(), stream);
      }
    }
  };
  cudaGraphExec_t graph = nullptr;
  if (as_graph) {
    cudaGraph_t captured = nullptr;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
    enqueue();
    check(cudaStreamEndCapture(stream, &captured), "capture");
    check(cudaGraphInstantiate(&graph, captured, 0), "graph");
    check(cudaGraphDestroy(captured), "graph");
  }
  Truth tokens(shape);  // the same in both layers
  for (uint32_t step = 0; step < steps_of_test; ++step) {
    auto x = random_floats(rng, size_t{shape.q_heads} * shape.head_dim);
    for (float& y : x) y = rounded(y, DType::f16);
    const Token token = random_tokens(rng, shape, 1)[0];
    q.write(x);
    k.write(token.k);
    v.write(token.v);
    check(cudaDeviceSynchronize(), "filled");
    tokens.take(token);
    if (as_graph) {
      check(cudaGraphLaunch(graph, stream), "launch");
    } else {
      enqueue();
    }
    steps.synchronize(stream);
    for (uint32_t layer = 0; layer < shape.layers; ++layer) {
      SCOPED_TRACE("step " + std::to_string(step) + ", layer " + std::to_string(layer));
      Truth all = tokens;
      for (uint32_t i = 0; i < kPartitions; ++i) partitions[layer].add_to(all, i);
      const States want = all.attend(x);
      EXPECT_LT(worst_error(out[layer].read(), want), 1e-3);
      EXPECT_LT(worst_lse(lse[layer].read(), want), 1e-3);
    }
  }
  host.join();
  EXPECT_EQ(served, steps_of_test * shape.layers);
  if (graph != nullptr) check(cudaGraphExecDestroy(graph), "graph");
  check(cudaStreamDestroy(stream), "stream");
}

TEST(CudaStepsWithPartitions, DeviceAndHostAddUpToAllPartitions) {
  KEYHOLE_NEEDS_GPU();
  run(false);
}

TEST(CudaStepsWithPartitions, AsAGraph) {
  KEYHOLE_NEEDS_GPU();
  run(true);
}

}  // namespace
}  // namespace keyhole::gpu::test
