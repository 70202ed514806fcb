// keyhole_prompt on an engine on the host, and its choice of blocks, against double precision.
#include <keyhole/prefill.h>

#include <algorithm>
#include <fstream>
#include <numeric>

#include "runtime/engine/block_choice.h"
#include "tests/runtime/fixture.h"
#include "tests/temporary_folder.h"

namespace keyhole::test {
namespace {

using cpu::kPromptQueries;
using cpu::kPromptRows;

struct Prompt {
  explicit Prompt(keyhole_engine* engine, const char* pattern) {
    EXPECT_OK(keyhole_prompt_create(engine, pattern, &p));
  }
  ~Prompt() { keyhole_prompt_destroy(p); }
  Prompt(const Prompt&) = delete;
  Prompt& operator=(const Prompt&) = delete;
  keyhole_prompt* p = nullptr;
};

keyhole_tensor tensor_of(float* x, int64_t n, int64_t heads, int64_t dim) {
  keyhole_tensor t{};
  t.data = x;
  t.dtype = KEYHOLE_F32;
  t.memory = KEYHOLE_HOST;
  t.rank = 3;
  t.shape[0] = n, t.shape[1] = heads, t.shape[2] = dim;
  t.strides[0] = heads * dim, t.strides[1] = dim, t.strides[2] = 1;
  return t;
}

constexpr uint32_t kHeads = 4, kKvHeads = 2, kDim = 64;

/// q, k and v `[tokens, heads, 64]`, in which every 37th key is large.
struct Tokens {
  Tokens(uint32_t tokens, uint64_t seed, float large = 3.0F) : n(tokens) {
    std::mt19937_64 rng(seed);
    std::normal_distribution<float> normal;
    for (auto [x, heads] : {std::pair{&q, kHeads}, {&k, kKvHeads}, {&v, kKvHeads}}) {
      x->resize(size_t{n} * heads * kDim);
      for (float& y : *x) y = normal(rng);
    }
    for (size_t i = 0; i < n; i += 37) {
      for (size_t j = 0; j < kKvHeads * kDim; ++j) k[i * kKvHeads * kDim + j] *= large;
    }
  }
  [[nodiscard]] double logit(uint32_t query, uint32_t head, uint32_t row) const {
    double x = 0;
    for (uint32_t j = 0; j < kDim; ++j) {
      x += double{q[(size_t{query} * kHeads + head) * kDim + j]} *
           double{k[(size_t{row} * kKvHeads + head / 2) * kDim + j]};
    }
    return x / 8.0;
  }
  uint32_t n;
  std::vector<float> q, k, v;
};

struct Output {
  std::vector<float> o, lse;
  bool operator==(const Output&) const = default;
};

/// The newest `queries` of the tokens in chunks.
Output attend(keyhole_prompt* prompt, Tokens& t, uint32_t queries, uint32_t chunk,
              uint32_t layer = 0) {
  Output out{std::vector<float>(size_t{queries} * kHeads * kDim, NAN),
             std::vector<float>(size_t{queries} * kHeads, NAN)};
  for (uint32_t first = 0; first < queries; first += chunk) {
    const uint32_t n = std::min(chunk, queries - first), end = t.n - queries + first + n;
    const keyhole_tensor q = tensor_of(&t.q[size_t{end - n} * kHeads * kDim], n, kHeads, kDim),
                         k = tensor_of(t.k.data(), end, kKvHeads, kDim),
                         v = tensor_of(t.v.data(), end, kKvHeads, kDim),
                         o = tensor_of(&out.o[size_t{first} * kHeads * kDim], n, kHeads, kDim);
    EXPECT_OK(keyhole_prompt_attend(prompt, layer, &q, &k, &v, &o, &out.lse[size_t{first} * kHeads],
                                    nullptr));
  }
  return out;
}

/// Output and lse of one query and head over the rows that `attends` names, from the definition.
template <class Attends>
void expect_truth(const Tokens& t, const Output& out, uint32_t queries, uint32_t query,
                  uint32_t head, double sink, Attends&& attends) {
  const uint32_t position = t.n - queries + query;
  double sum = std::exp(sink);
  std::vector<double> o(kDim);
  for (uint32_t row = 0; row <= position; ++row) {
    if (!attends(row)) continue;
    const double w = std::exp(t.logit(position, head, row));
    sum += w;
    for (uint32_t j = 0; j < kDim; ++j) {
      o[j] += w * double{t.v[(size_t{row} * kKvHeads + head / 2) * kDim + j]};
    }
  }
  const size_t at = size_t{query} * kHeads + head;
  ASSERT_NEAR(out.lse[at], std::log(sum), 2e-5 * (1 + std::fabs(std::log(sum))))
      << query << ", " << head;
  for (uint32_t j = 0; j < kDim; ++j) {
    ASSERT_NEAR(out.o[at * kDim + j], o[j] / sum, 2e-5 * (1 + std::fabs(o[j] / sum)))
        << query << ", " << head << ", " << j;
  }
}

TEST(HostPrompt, PatternsAttendWhatTheySay) {
  keyhole_engine_config config = small_engine();
  std::vector<keyhole_layer_config> layers(2);
  for (keyhole_layer_config& layer : layers) keyhole_layer_config_init(&layer, &config);
  layers[1].window = 90;
  std::vector<float> sinks = {0.5F, -1.0F, 2.0F, 0.0F, 1.0F, 1.5F, -3.0F, 0.25F};
  config.layer_configs = layers.data();
  config.layer_count = 2;
  config.sink_logits = sinks.data();
  const EnginePtr engine = make_engine(config);
  Tokens tokens(700, 7);
  constexpr uint32_t kQueries = 333;
  for (const char* pattern : {"dense", "a-shape:first=64,near=128", "sampled", "auto"}) {
    SCOPED_TRACE(pattern);
    const Prompt prompt(engine.get(), pattern);
    const bool is_a_shape = std::string(pattern).starts_with("a-shape");
    for (uint32_t layer = 0; layer < 2; ++layer) {
      const Output out = attend(prompt.p, tokens, kQueries, kQueries, layer);
      for (uint32_t at = 0; at < kQueries * kHeads; at += 13) {
        const uint32_t query = at / kHeads, head = at % kHeads;
        const uint32_t position = tokens.n - kQueries + query;
        const uint32_t tile = tokens.n - kQueries + query / kPromptQueries * kPromptQueries;
        expect_truth(tokens, out, kQueries, query, head, double{sinks[layer * kHeads + head]},
                     [&](uint32_t row) {
                       if (layer == 1) return position - row < 90;
                       return !is_a_shape || row < 64 ||
                              row / kPromptRows + 2 >= tile / kPromptRows;
                     });
      }
    }
    uint64_t attended = 0, seen = 0;
    ASSERT_OK(keyhole_prompt_blocks(prompt.p, &attended, &seen));
    // Three tiles that begin at 367, 495 and 623 see 8, 10 and 11 blocks: the first, and from the 3rd, 5th and 7th on.
    EXPECT_EQ(seen, is_a_shape ? kHeads * (8 + 10 + 11) : 0);
    EXPECT_EQ(attended, is_a_shape ? kHeads * (6 + 6 + 5) : 0);
  }
}

/// What groups of queries of a call choose, from its definition: of the newest `queries` tokens, groups of `group` at a time.
struct GroupChoice {
  const Tokens& t;
  uint32_t queries, group;
  bool pools;

  [[nodiscard]] uint32_t first() const { return t.n - queries; }
  /// Weights of the blocks that the group with the given first query sees.
  [[nodiscard]] std::vector<double> weights(uint32_t query, uint32_t head) const {
    const uint32_t end = std::min(query + group, queries);
    std::vector<double> w;
    for (uint32_t row = 0; row < first() + end; row += pools ? kPromptRows : group) {
      w.resize(row / kPromptRows + 1);
      double x = 0;
      if (pools) {
        const uint32_t to = std::min(row + kPromptRows, t.n);
        for (uint32_t i = query; i < end; ++i) {
          for (uint32_t j = row; j < to; ++j) x += t.logit(first() + i, head, j);
        }
        x /= (end - query) * (to - row);
      } else {
        for (uint32_t j = 0; j < group; ++j) {
          const uint32_t i = query + group - 1 - j;
          if (i < queries && row + j < t.n) x += t.logit(first() + i, head, row + j) / group;
        }
      }
      w.back() += std::exp(x);
    }
    return w;
  }
  /// Shares of a tile's groups, on average.
  [[nodiscard]] std::vector<double> shares(uint32_t tile, uint32_t head) const {
    const uint32_t from = tile * kPromptQueries, to = std::min(from + kPromptQueries, queries);
    std::vector<double> share((first() + to - 1) / kPromptRows + 1);
    const uint32_t groups = (to - from + group - 1) / group;
    for (uint32_t query = from; query < to; query += group) {
      const std::vector<double> w = weights(query, head);
      const double sum = std::accumulate(w.begin(), w.end(), 0.0);
      for (size_t b = 0; b < w.size(); ++b) share[b] += w[b] / sum / groups;
    }
    return share;
  }
  /// The tile's blocks beside the first and those from one before its first query's on: so many of the heaviest, or, by bins of an
  /// eighth of an octave, those that hold the mass.
  [[nodiscard]] std::vector<bool> chosen(uint32_t tile, uint32_t head, size_t most,
                                         double mass) const {
    const std::vector<double> share = shares(tile, head);
    const uint32_t own = (first() + tile * kPromptQueries) / kPromptRows;
    std::vector<bool> in(share.size());
    std::vector<size_t> others;
    double held = 0;
    for (size_t b = 0; b < share.size(); ++b) {
      in[b] = b == 0 || b + 1 >= own;
      if (in[b])
        held += share[b];
      else
        others.push_back(b);
    }
    std::sort(others.begin(), others.end(),
              [&](size_t a, size_t b) { return share[a] > share[b]; });
    const auto bin = [&](size_t b) { return std::floor(-std::log2(share[b]) * 8); };
    for (size_t i = 0; i < others.size(); ++i) {
      const bool is_wanted = most != 0 ? i < most
                                       : held < mass || (i > 0 && in[others[i - 1]] &&
                                                         bin(others[i]) == bin(others[i - 1]));
      if (!is_wanted) break;
      in[others[i]] = true;
      held += share[others[i]];
    }
    return in;
  }
};

TEST(HostPrompt, GroupsOfQueriesChooseBlocks) {
  const EnginePtr engine = make_engine(small_engine());
  Tokens tokens(unless_sanitized(1500, 900), 13);
  constexpr uint32_t kQueries = 333;
  struct Case {
    const char* pattern;
    uint32_t group, most;
    double mass;
  };
  for (const Case& c : {Case{"pooled:blocks=3,first=64,near=64,from=0", 64, 3, 0},
                        Case{"pooled:mass=600,first=64,near=64,from=0", 64, 0, 0.6},
                        Case{"antidiagonal:stride=8,mass=500,first=64,near=64,from=0", 8, 0, 0.5},
                        Case{"antidiagonal:mass=350,first=64,near=64,from=0", 16, 0, 0.35}}) {
    SCOPED_TRACE(c.pattern);
    const GroupChoice choice{tokens, kQueries, c.group, c.group == 64};
    const Prompt prompt(engine.get(), c.pattern);
    const Output out = attend(prompt.p, tokens, kQueries, kQueries);
    uint64_t attended = 0, wanted = 0, seen = 0, expected_seen = 0;
    for (uint32_t head = 0; head < kHeads; ++head) {
      for (uint32_t tile = 0; tile * kPromptQueries < kQueries; ++tile) {
        const std::vector<bool> in = choice.chosen(tile, head, c.most, c.mass);
        wanted += static_cast<uint64_t>(std::count(in.begin(), in.end(), true));
        expected_seen += in.size();
        for (uint32_t i = 5; i < kPromptQueries; i += 50) {
          const uint32_t query = tile * kPromptQueries + i;
          if (query >= kQueries) break;
          expect_truth(tokens, out, kQueries, query, head, -INFINITY,
                       [&](uint32_t row) { return in[row / kPromptRows]; });
          if (HasFatalFailure()) return;
        }
      }
    }
    ASSERT_OK(keyhole_prompt_blocks(prompt.p, &attended, &seen));
    EXPECT_EQ(attended, wanted);
    EXPECT_EQ(seen, expected_seen);
    EXPECT_LT(attended, seen);
  }
}

/// The `most` heaviest of [first, end); how much less than the last of them the next one weighs is far more than rounding.
std::vector<uint32_t> heaviest(const std::vector<double>& weights, uint32_t first, uint32_t end,
                               uint32_t most) {
  std::vector<uint32_t> order;
  for (uint32_t i = first; i < end; ++i) order.push_back(i);
  std::sort(order.begin(), order.end(),
            [&](uint32_t a, uint32_t b) { return weights[a] > weights[b]; });
  if (most < order.size()) {
    if (most > 0) {
      EXPECT_GT(weights[order[most - 1]], weights[order[most]] * 1.0001) << "too close to call";
    }
    order.resize(most);
  }
  return order;
}

TEST(HostPrompt, ColumnsAndDiagonalsAreThoseOfTheLastQueries) {
  const EnginePtr engine = make_engine(small_engine());
  struct Case {
    uint32_t tokens, queries;  // and of a call
    uint32_t columns, slashes, of, first, near;
  };
  constexpr Case kCases[] = {
      {700, 200, 20, 3, 64, 1, 1},      // two tiles, ragged, behind other rows
      {300, 1, 5, 2, 64, 0, 0},         // a single query
      {40, 40, 300, 300, 64, 0, 0},     // fewer queries than wanted, fewer rows than lines
      {900, 300, 100, 0, 33, 1, 2},     // no diagonals, some of the queries
      {900, 257, 0, 5, 64, 0, 1},       // no columns
      {1500, 333, 80, 2, 17, 2, 3},     // more rows than attention takes at once
      {1500, 333, 16384, 0, 64, 0, 0},  // every row
  };
  for (const Case& c : kCases) {
    Tokens tokens(c.tokens, 14);
    // Queries like the key 200 rows back.
    for (uint32_t i = 200; i < tokens.n; ++i) {
      for (uint32_t j = 0; j < kHeads * kDim; ++j) {
        tokens.q[size_t{i} * kHeads * kDim + j] +=
            0.3F * tokens.k[(size_t{i - 200} * kKvHeads + j / kDim / 2) * kDim + j % kDim];
      }
    }
    const std::string pattern =
        "vertical-slash:from=0,columns=" + std::to_string(c.columns) +
        ",slashes=" + std::to_string(c.slashes) + ",queries=" + std::to_string(c.of) +
        ",first=" + std::to_string(c.first * 64) + ",near=" + std::to_string(c.near * 64);
    SCOPED_TRACE(pattern + " of " + std::to_string(c.tokens));
    const Prompt prompt(engine.get(), pattern.c_str());
    const Output out = attend(prompt.p, tokens, c.queries, c.queries);
    const uint32_t before = c.tokens - c.queries, tiles = (c.queries + 127) / 128;
    uint64_t wanted_blocks = 0, wanted_seen = 0;
    for (uint32_t head = 0; head < kHeads; ++head) {
      std::vector<double> columns(c.tokens), slashes(c.tokens);
      for (uint32_t i = c.queries - std::min(c.of, c.queries); i < c.queries; ++i) {
        const uint32_t position = before + i;
        std::vector<double> w(position + 1);
        double sum = 0;
        for (uint32_t row = 0; row <= position; ++row) {
          sum += w[row] = std::exp(tokens.logit(position, head, row));
        }
        for (uint32_t row = 0; row <= position; ++row) {
          columns[row] += w[row] / sum;
          slashes[position - row] += w[row] / sum;
        }
      }
      const uint32_t own = (before + (tiles - 1) * kPromptQueries) / kPromptRows;
      const uint32_t near = own > c.near ? own - c.near : 0;
      const std::vector<uint32_t> rows = heaviest(columns, c.first * kPromptRows,
                                                  near * kPromptRows, c.columns),
                                  distances = heaviest(slashes, c.near * kPromptRows + 1, c.tokens,
                                                       c.slashes);
      for (uint32_t tile = 0; tile < tiles; ++tile) {
        const uint32_t first = before + tile * kPromptQueries;
        const uint32_t last = before + std::min((tile + 1) * kPromptQueries, c.queries) - 1;
        std::vector<bool> listed(last / kPromptRows + 1), single(c.tokens);
        for (uint32_t b = 0; b < listed.size(); ++b) {
          listed[b] = b < c.first || b + c.near >= first / kPromptRows;
        }
        for (const uint32_t distance : distances) {
          for (uint32_t q = std::max(first, distance); q <= last; ++q) {
            listed[(q - distance) / kPromptRows] = true;
          }
        }
        uint32_t beside = 0;
        for (const uint32_t row : rows) {
          if (row >= first || listed[row / kPromptRows]) continue;
          single[row] = true;
          ++beside;
        }
        wanted_blocks += static_cast<uint64_t>(std::count(listed.begin(), listed.end(), true)) +
                         (beside + kPromptRows - 1) / kPromptRows;
        wanted_seen += listed.size();
        for (uint32_t position = first; position <= last; position += 50) {
          expect_truth(tokens, out, c.queries, position - before, head, -INFINITY,
                       [&](uint32_t row) { return listed[row / kPromptRows] || single[row]; });
          if (HasFatalFailure()) return;
        }
      }
    }
    uint64_t attended = 0, seen = 0;
    ASSERT_OK(keyhole_prompt_blocks(prompt.p, &attended, &seen));
    EXPECT_EQ(attended, wanted_blocks);
    EXPECT_EQ(seen, wanted_seen);
  }
}

TEST(HostPrompt, ChunksOfWholeTilesChooseAlike) {
  const EnginePtr engine = make_engine(small_engine());
  Tokens tokens(1500, 8);
  const Prompt prompt(engine.get(), "sampled:mass=800,lookups=1000,first=64,near=64,from=0"),
      dense(engine.get(), "dense"), all(engine.get(), "sampled:mass=1000,first=99999,from=0");
  const Output whole = attend(prompt.p, tokens, 1280, 1280),
               exact = attend(dense.p, tokens, 1280, 1280);
  EXPECT_EQ(attend(prompt.p, tokens, 1280, 256), whole);
  EXPECT_EQ(attend(all.p, tokens, 1280, 1280), exact);
  EXPECT_EQ(attend(dense.p, tokens, 1280, 300), exact);
  uint64_t attended = 0, seen = 0;
  ASSERT_OK(keyhole_prompt_blocks(prompt.p, &attended, &seen));
  EXPECT_LT(attended, seen * 9 / 10);
  // Less is attended, and nothing beyond what dense attention has; most of the weight is held.
  double held = 0;
  for (size_t i = 0; i < whole.lse.size(); ++i) {
    ASSERT_LE(whole.lse[i], exact.lse[i] + 1e-5);
    held += std::exp(double{whole.lse[i]} - double{exact.lse[i]});
  }
  EXPECT_GT(held / static_cast<double>(whole.lse.size()), 0.75);
}

TEST(HostPrompt, HeadsHavePatternsOfTheirOwn) {
  const EnginePtr engine = make_engine(small_engine());
  Tokens tokens(900, 9);
  const char* const kPatterns[] = {"sampled:mass=700,first=64,near=64,from=0", "dense",
                                   "vertical-slash:columns=70,slashes=2,first=64,near=64,from=0",
                                   "sampled:mass=700,stride=32,first=64,near=64,from=0"};
  const Prompt mixed(engine.get(), "dense");
  for (uint32_t h = 0; h < kHeads; ++h) {
    ASSERT_OK(keyhole_prompt_set_pattern(mixed.p, 1, h, kPatterns[h]));
  }
  const Output out = attend(mixed.p, tokens, 700, 700, 1);
  for (uint32_t h = 0; h < kHeads; ++h) {
    const Prompt one(engine.get(), kPatterns[h]);
    const Output alike = attend(one.p, tokens, 700, 700, 1);
    for (size_t at = h; at < out.lse.size(); at += kHeads) {
      ASSERT_EQ(out.lse[at], alike.lse[at]) << kPatterns[h] << ", query " << at / kHeads;
      ASSERT_TRUE(std::equal(&out.o[at * kDim], &out.o[at * kDim] + kDim, &alike.o[at * kDim]));
    }
  }
  const Prompt dense(engine.get(), "dense");
  const Output exact = attend(dense.p, tokens, 700, 700);
  EXPECT_EQ(attend(mixed.p, tokens, 700, 700, 0), exact);  // the other layer has kept its own
  ASSERT_OK(keyhole_prompt_set_pattern(mixed.p, KEYHOLE_ALL, KEYHOLE_ALL, "dense"));
  EXPECT_EQ(attend(mixed.p, tokens, 700, 700, 1), exact);

  const auto says = [](const char* text) {
    return std::string(keyhole_last_error()).find(text) != std::string::npos;
  };
  EXPECT_EQ(keyhole_prompt_set_pattern(mixed.p, 2, 0, "dense"), KEYHOLE_INVALID_ARGUMENT);
  EXPECT_TRUE(says("layer is 2, allowed: 0..1 and KEYHOLE_ALL")) << keyhole_last_error();
  EXPECT_EQ(keyhole_prompt_set_pattern(mixed.p, 0, 4, "dense"), KEYHOLE_INVALID_ARGUMENT);
  EXPECT_TRUE(says("q_head is 4, allowed: 0..3 and KEYHOLE_ALL")) << keyhole_last_error();
  EXPECT_EQ(keyhole_prompt_set_pattern(mixed.p, 0, 0, "sparse"), KEYHOLE_INVALID_ARGUMENT);
  EXPECT_EQ(keyhole_prompt_set_pattern(mixed.p, 0, 0, nullptr), KEYHOLE_INVALID_ARGUMENT);
  EXPECT_EQ(keyhole_prompt_set_pattern(nullptr, 0, 0, "dense"), KEYHOLE_INVALID_ARGUMENT);
  EXPECT_EQ(attend(mixed.p, tokens, 700, 700, 0), exact);
}

TEST(HostPrompt, AFileOfBudgetsSaysWhatHeadsAttend) {
  const TemporaryFolder folder;
  const std::string path = (folder / "budgets.json").string();
  const auto write = [&](const std::string& heads) {
    std::ofstream(path) << R"({"keyhole_budgets": 1, "model": {"layers": 2, "q_heads": 4, )"
                        << R"("kv_heads": 2, "head_dim": 64}, "heads": [)" << heads << "]}";
  };
  const EnginePtr engine = make_engine(small_engine());
  Tokens tokens(900, 12);
  write(R"({"layer": 1, "q_head": 2, "pattern": "a-shape:first=64,near=64"},
           {"layer": "all", "q_head": 3, "pattern": "sampled:mass=700,from=0"},
           {"layer": 0, "kv_head": 0, "top_k": 3})");
  const Prompt read(engine.get(), ("budgets:" + path).c_str()), said(engine.get(), "dense");
  ASSERT_OK(keyhole_prompt_set_pattern(said.p, 1, 2, "a-shape:first=64,near=64"));
  ASSERT_OK(keyhole_prompt_set_pattern(said.p, KEYHOLE_ALL, 3, "sampled:mass=700,from=0"));
  for (const uint32_t layer : {0U, 1U}) {
    EXPECT_EQ(attend(read.p, tokens, 700, 700, layer), attend(said.p, tokens, 700, 700, layer));
  }
  keyhole_prompt* none = nullptr;
  const auto create = [&](const std::string& pattern) {
    return keyhole_prompt_create(engine.get(), pattern.c_str(), &none);
  };
  const auto says = [](const char* text) {
    return std::string(keyhole_last_error()).find(text) != std::string::npos;
  };
  EXPECT_EQ(create("budgets:"), KEYHOLE_INVALID_ARGUMENT);
  EXPECT_EQ(create("budgets:" + path + ".not"), KEYHOLE_IO);
  write(R"({"layer": 1, "q_head": 2, "pattern": "sparse"})");
  EXPECT_EQ(create("budgets:" + path), KEYHOLE_INVALID_ARGUMENT);
  EXPECT_TRUE(says("heads[0].pattern: ")) << keyhole_last_error();
  write(R"({"layer": 1, "q_head": 4, "pattern": "dense"})");
  EXPECT_EQ(create("budgets:" + path), KEYHOLE_CORRUPT);
  keyhole_engine_config other = small_engine();
  other.layers = 3;
  const EnginePtr larger = make_engine(other);
  write("");
  EXPECT_EQ(keyhole_prompt_create(larger.get(), ("budgets:" + path).c_str(), &none),
            KEYHOLE_INVALID_ARGUMENT);
  EXPECT_EQ(none, nullptr);
}

TEST(HostPrompt, HeadsThatLookUpSingleRowsAreDense) {
  const EnginePtr engine = make_engine(small_engine());
  Tokens tokens(2048, 10, 1.0F);
  constexpr uint32_t kQueries = 256;
  // Every fourth query of head 0 looks for a key of its own, with a logit of about 12.5 where others have 1.
  for (uint32_t t = 3; t < kQueries; t += 4) {
    const size_t row = size_t{t} * 5 + 100;
    for (uint32_t j = 0; j < kDim; ++j) {
      tokens.q[size_t{tokens.n - kQueries + t} * kHeads * kDim + j] =
          12.5F / 8.0F * tokens.k[row * kKvHeads * kDim + j];
    }
  }
  const Prompt careful(engine.get(), "sampled:mass=500,lookups=500,first=64,near=64,from=0"),
      careless(engine.get(), "sampled:mass=500,lookups=1000,first=64,near=64,from=0"),
      dense(engine.get(), "dense");
  const Output a = attend(careful.p, tokens, kQueries, kQueries),
               b = attend(careless.p, tokens, kQueries, kQueries),
               exact = attend(dense.p, tokens, kQueries, kQueries);
  bool differs = false;
  for (size_t at = 0; at < exact.lse.size(); ++at) {
    if (at % kHeads == 0) {
      ASSERT_EQ(a.lse[at], exact.lse[at]);
      differs = differs || b.lse[at] != exact.lse[at];
    } else {
      ASSERT_EQ(a.lse[at], b.lse[at]);
    }
  }
  EXPECT_TRUE(differs);
}

TEST(HostPrompt, OutMayBeTheQueries) {
  const EnginePtr engine = make_engine(small_engine());
  Tokens tokens(600, 11);
  const Prompt prompt(engine.get(), "sampled:mass=700,first=64,near=64,from=0");
  const Output apart = attend(prompt.p, tokens, 600, 600);
  const keyhole_tensor q = tensor_of(tokens.q.data(), 600, kHeads, kDim),
                       k = tensor_of(tokens.k.data(), 600, kKvHeads, kDim),
                       v = tensor_of(tokens.v.data(), 600, kKvHeads, kDim);
  ASSERT_OK(keyhole_prompt_attend(prompt.p, 0, &q, &k, &v, &q, nullptr, nullptr));
  EXPECT_EQ(tokens.q, apart.o);
  keyhole_tensor device = q;
  device.memory = KEYHOLE_DEVICE;
  EXPECT_EQ(keyhole_prompt_attend(prompt.p, 0, &device, &k, &v, &q, nullptr, nullptr),
            KEYHOLE_UNSUPPORTED);
  const keyhole_tensor more = tensor_of(tokens.q.data(), 300, kHeads, kDim),
                       fewer = tensor_of(tokens.k.data(), 299, kKvHeads, kDim);
  EXPECT_EQ(keyhole_prompt_attend(prompt.p, 0, &more, &fewer, &fewer, &more, nullptr, nullptr),
            KEYHOLE_INVALID_ARGUMENT);
}

TEST(HostBlockChoice, TakesSoManyOfTheHeaviest) {
  const auto seed = static_cast<uint64_t>(testing::UnitTest::GetInstance()->random_seed());
  for (uint32_t i = 0; i < cases(100); ++i) {
    std::mt19937_64 rng(seed * 1000 + i);
    SCOPED_TRACE("seed " + std::to_string(seed) + ", case " + std::to_string(i));
    cpu::PromptPiece piece;
    piece.n = 1 + rng() % 200;
    piece.rows = piece.n + rng() % 4000;
    const cpu::PromptPiece::Span seen = piece.seen(0);
    const auto most = static_cast<uint32_t>(1 + rng() % 20);
    const runtime::BlockRule rule{static_cast<uint32_t>(rng() % 3),
                                  static_cast<uint32_t>(rng() % 4), 0.5F, most};
    // Of few values, so that many are equal; some blocks have no weight.
    std::vector<float> weights(seen.end);
    for (float& x : weights) x = rng() % 5 == 0 ? kMinusInf : static_cast<float>(rng() % 4);
    weights[0] = 0.0F;
    const uint32_t own = piece.position(0) / kPromptRows;
    std::vector<std::pair<float, uint32_t>> others;
    std::vector<uint32_t> wanted;
    for (uint32_t b = 0; b < seen.end; ++b) {
      if (b < rule.first_blocks || b + rule.near_blocks >= own)
        wanted.push_back(b);
      else if (weights[b] != kMinusInf)
        others.emplace_back(-weights[b], b);
    }
    std::sort(others.begin(), others.end());
    for (size_t j = 0; j < std::min<size_t>(most, others.size()); ++j)
      wanted.push_back(others[j].second);
    std::sort(wanted.begin(), wanted.end());
    std::vector<uint32_t> list(piece.blocks());
    const runtime::TileChoice choice =
        runtime::choose_blocks(piece, 0, rule, {weights.data(), 1, weights.size()}, list.data());
    list.resize(choice.count);
    EXPECT_EQ(list, wanted);
  }
}

// Random weights: a list holds the wanted share of the samples' weight, no block of it could be missed, and none that is left out
// weighs more than one that is taken, by more than the eighth of an octave that they are told apart by.
TEST(HostBlockChoice, TakesTheHeaviestBlocksUntilTheMassIsHeld) {
  const auto seed = static_cast<uint64_t>(testing::UnitTest::GetInstance()->random_seed());
  for (uint32_t i = 0; i < cases(200); ++i) {
    std::mt19937_64 rng(seed * 1000 + i);
    SCOPED_TRACE("seed " + std::to_string(seed) + ", case " + std::to_string(i));
    cpu::PromptPiece piece;
    piece.n = 1 + rng() % 400;
    piece.rows = piece.n + rng() % 4000;
    const auto tile = static_cast<uint32_t>(rng() % piece.tiles());
    const cpu::PromptPiece::Span seen = piece.seen(tile);
    const auto samples = static_cast<uint32_t>(1 + rng() % 9);
    const size_t stride = seen.end + rng() % 3;
    const runtime::BlockRule rule{static_cast<uint32_t>(rng() % 3),
                                  static_cast<uint32_t>(rng() % 4),
                                  static_cast<float>(rng() % 1001) / 1000.0F};
    std::normal_distribution<float> normal(0.0F, static_cast<float>(1 + rng() % 4));
    std::vector<float> weights(samples * stride);
    for (float& x : weights) x = rng() % 9 == 0 ? kMinusInf : normal(rng);
    for (uint32_t s = 0; s < samples; ++s)
      weights[s * stride] = 0.0F;  // every sample sees something
    std::vector<double> share(seen.end);
    double looked_up = 0;
    const uint32_t own = piece.position(tile * kPromptQueries) / kPromptRows;
    const auto is_kept = [&](uint32_t b) {
      return b < rule.first_blocks || b + rule.near_blocks >= own;
    };
    std::vector<std::vector<double>> each(samples, std::vector<double>(seen.end));
    for (uint32_t s = 0; s < samples; ++s) {
      double sum = 0;
      for (uint32_t b = 0; b < seen.end; ++b) sum += std::exp(double{weights[s * stride + b]});
      for (uint32_t b = 0; b < seen.end; ++b) {
        each[s][b] = std::exp(double{weights[s * stride + b]}) / sum;
        share[b] += each[s][b] / samples;
      }
    }
    for (uint32_t b = 0; b < seen.end && samples > 1; ++b) {
      std::vector<double> x;
      for (const auto& of_sample : each) x.push_back(of_sample[b]);
      std::sort(x.rbegin(), x.rend());
      if (!is_kept(b) && x[0] > 8 * x[1]) looked_up += x[0] / samples;
    }
    std::vector<uint32_t> list(piece.blocks());
    const runtime::TileChoice choice =
        runtime::choose_blocks(piece, tile, rule, {weights.data(), samples, stride}, list.data());
    EXPECT_NEAR(static_cast<double>(choice.looked_up) / runtime::kShareUnits, looked_up, 1e-3);
    std::vector<bool> in(seen.end);
    double held = 0, least = INFINITY, most_left = 0;
    for (uint32_t j = 0; j < choice.count; ++j) {
      const uint32_t b = list[j];
      ASSERT_LT(b, seen.end);
      ASSERT_TRUE(j == 0 || b > list[j - 1]);
      in[b] = true;
      held += share[b];
      if (!is_kept(b)) least = std::min(least, share[b]);
    }
    double without = held;
    for (uint32_t b = 0; b < seen.end; ++b) {
      if (is_kept(b)) {
        ASSERT_TRUE(in[b]) << b;
      } else if (!in[b]) {
        most_left = std::max(most_left, share[b]);
      } else if (share[b] < least * 1.1) {
        without -= share[b];
      }
    }
    EXPECT_GE(held, double{rule.mass} - 1e-5);
    EXPECT_LE(most_left, least * 1.001);
    if (least != INFINITY) {
      EXPECT_LT(without, double{rule.mass} + 1e-5);
    }
  }
}

}  // namespace
}  // namespace keyhole::test
