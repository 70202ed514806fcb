#include "tests/tools/cli/synthetic_trace.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <set>

#include "tests/normal.h"

namespace keyhole::tools {
namespace {

std::vector<float> normal(size_t count, float deviation, std::mt19937& random) {
  keyhole::test::Normal<float> distribution(0, deviation);
  std::vector<float> out(count);
  for (float& x : out) x = distribution(random);
  return out;
}

// softmax(logits of `tokens`) * values
std::vector<double> attend(const SyntheticTrace& trace, size_t head, size_t query, size_t j,
                           const std::set<size_t>& tokens) {
  const size_t d = trace.info.head_dim;
  std::vector<double> out(d);
  double sum = 0;
  for (const size_t token : tokens) {
    const double weight = std::exp(trace.logit(head, query, j, token));
    sum += weight;
    for (size_t x = 0; x < d; ++x) out[x] += weight * trace.values[head][token * d + x];
  }
  for (double& x : out) x /= sum;
  return out;
}

double norm(const std::vector<double>& v) {
  return std::sqrt(std::inner_product(v.begin(), v.end(), v.begin(), 0.0));
}

}  // namespace

void SyntheticTrace::write(const std::filesystem::path& path) const {
  TraceWriter writer(path, info, options);
  const size_t d = info.head_dim;
  const size_t group_width = info.group() * d;
  for (size_t h = 0; h < keys.size(); ++h) {
    writer.write_head({keys[h].data(), info.tokens, d}, {values[h].data(), info.tokens, d},
                      {queries[h].data(), options.query_positions.size(), group_width},
                      {training[h].data(), options.training_positions.size(), group_width});
  }
  writer.finish();
}

double SyntheticTrace::inner_product(size_t head, size_t query, size_t j, size_t token) const {
  const size_t d = info.head_dim;
  const float* q = queries[head].data() + (query * info.group() + j) * d;
  const float* k = keys[head].data() + token * d;
  return std::inner_product(q, q + d, k, 0.0, std::plus<>(),
                            [](double a, double b) { return a * b; });
}

double SyntheticTrace::logit(size_t head, size_t query, size_t j, size_t token) const {
  const double scaled = info.scale * inner_product(head, query, j, token);
  return info.softcap > 0 ? info.softcap * std::tanh(scaled / info.softcap) : scaled;
}

SyntheticTrace make_synthetic_trace(const SyntheticShape& shape, std::mt19937& random) {
  SyntheticTrace trace;
  TraceInfo& info = trace.info;
  info.kv_heads = shape.kv_heads;
  info.q_heads = shape.kv_heads * shape.group;
  info.head_dim = shape.dim;
  info.scale = 1 / std::sqrt(static_cast<float>(shape.dim));
  info.softcap = shape.softcap;
  info.rope.theta = 10000;
  for (uint32_t layer = 0; layer < shape.layers; ++layer) info.layers.push_back(3 * layer + 1);
  info.tokens = shape.tokens;
  info.model = "synthetic";
  info.task = "test";
  info.seed = 7;
  trace.options.kv_type = ElementType::f32;
  trace.options.query_type = ElementType::f32;
  // Every second of the last tokens: some tokens lie after some queries.
  for (uint32_t i = 0; i < shape.queries; ++i) {
    trace.options.query_positions.push_back(shape.tokens - 2 * (shape.queries - i));
  }
  for (uint32_t i = 0; i < shape.training; ++i) trace.options.training_positions.push_back(i * 5);

  const size_t d = shape.dim;
  for (uint32_t head = 0; head < shape.layers * shape.kv_heads; ++head) {
    const float sharpness = 0.5F + 0.7F * static_cast<float>(head);
    trace.keys.push_back(normal(shape.tokens * d, 1, random));
    // The newest keys weigh most: whoever lets a query see beyond its position gets everything wrong.
    for (size_t i = (shape.tokens - 1) * d; i < shape.tokens * d; ++i) trace.keys.back()[i] *= 4;
    trace.values.push_back(normal(shape.tokens * d, 1, random));
    trace.queries.push_back(normal(size_t{shape.queries} * shape.group * d, sharpness, random));
    trace.training.push_back(normal(size_t{shape.training} * shape.group * d, sharpness, random));
  }
  return trace;
}

ExactSearch exact_search(const SyntheticTrace& trace, size_t head, size_t k, size_t sink,
                         size_t window, double min_weight) {
  const auto& positions = trace.options.query_positions;
  const size_t group = trace.info.group();
  const size_t offloaded_end = positions.front() + 1 - window;
  const auto rows = static_cast<double>(positions.size() * group);
  ExactSearch out;
  for (size_t query = 0; query < positions.size(); ++query) {
    std::set<size_t> visible;
    std::set<size_t> resident;
    for (size_t token = 0; token <= positions[query]; ++token) {
      visible.insert(token);
      if (token < sink || token >= offloaded_end) resident.insert(token);
    }
    std::set<size_t> attended = resident;
    std::vector<std::vector<size_t>> best(group);
    for (size_t j = 0; j < group; ++j) {
      std::vector<std::pair<double, size_t>> ranking;
      for (size_t token = sink; token < offloaded_end; ++token) {
        ranking.emplace_back(-trace.inner_product(head, query, j, token), token);
      }
      std::sort(ranking.begin(), ranking.end());
      for (size_t i = 0; i < std::min(k, ranking.size()); ++i) best[j].push_back(ranking[i].second);
      if (min_weight <= 0) {
        attended.insert(best[j].begin(), best[j].end());
        continue;
      }
      if (!ranking.empty())
        attended.insert(ranking.front().second);  // the heaviest, whatever it weighs
      double sum = 0;
      for (const auto& [_, token] : ranking) sum += std::exp(trace.logit(head, query, j, token));
      for (const auto& [_, token] : ranking) {
        if (std::exp(trace.logit(head, query, j, token)) > min_weight * sum) attended.insert(token);
      }
    }
    for (const std::vector<size_t>& of_head : best) {
      for (const size_t token : of_head) {
        out.recall += static_cast<double>(attended.count(token)) /
                      (static_cast<double>(of_head.size()) * rows);
      }
    }
    out.keys_attended += static_cast<double>(attended.size() - resident.size()) /
                         static_cast<double>(positions.size());
    for (size_t j = 0; j < group; ++j) {
      const auto mass = [&](const std::set<size_t>& tokens) {
        double sum = 0;
        for (const size_t token : tokens) sum += std::exp(trace.logit(head, query, j, token));
        return sum;
      };
      const double all = mass(visible);
      out.middle_mass += (1 - mass(resident) / all) / rows;
      out.recovered_mass += mass(attended) / all / rows;
      const std::vector<double> exact = attend(trace, head, query, j, visible);
      std::vector<double> difference = attend(trace, head, query, j, attended);
      for (size_t x = 0; x < difference.size(); ++x) difference[x] -= exact[x];
      out.errors.push_back(norm(difference) / norm(exact));
    }
  }
  return out;
}

}  // namespace keyhole::tools
