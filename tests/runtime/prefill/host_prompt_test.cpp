// keyhole_prompt on an engine on the host: patterns of all heads and of single ones, chunks, files of budgets.
#include <fstream>

#include "tests/runtime/prefill/host_prompt_fixture.h"
#include "tests/temporary_folder.h"

namespace keyhole::test {
namespace {

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
    ASSERT_OK(keyhole_prompt_get_blocks(prompt.p, &attended, &seen));
    // Three tiles that begin at 367, 495 and 623 see 8, 10 and 11 blocks: the first, and from the 3rd, 5th and 7th on.
    EXPECT_EQ(seen, is_a_shape ? kHeads * (8 + 10 + 11) : 0);
    EXPECT_EQ(attended, is_a_shape ? kHeads * (6 + 6 + 5) : 0);
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
  ASSERT_OK(keyhole_prompt_get_blocks(prompt.p, &attended, &seen));
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

// A stride of 0 says that all heads have the same rows, a negative one that tokens run backwards.
TEST(HostPrompt, StridesMayBeZeroOrNegative) {
  const EnginePtr engine = make_engine(small_engine());
  Tokens tokens(200, 13);
  for (auto* x : {&tokens.k, &tokens.v}) {
    for (size_t t = 0; t < tokens.n; ++t) {
      const auto row = x->begin() + static_cast<ptrdiff_t>(t * kKvHeads * kDim);
      std::copy_n(row, kDim, row + kDim);
    }
  }
  const Prompt prompt(engine.get(), "dense");
  const Output expected = attend(prompt.p, tokens, 200, 200);
  // The rows of the first head alone, the newest token first.
  const auto packed = [&](const std::vector<float>& x) {
    std::vector<float> rows;
    for (size_t t = tokens.n; t-- > 0;) {
      const auto row = x.begin() + static_cast<ptrdiff_t>(t * kKvHeads * kDim);
      rows.insert(rows.end(), row, row + kDim);
    }
    return rows;
  };
  std::vector<float> k = packed(tokens.k), v = packed(tokens.v);
  const auto backwards = [&](std::vector<float>& rows) {
    keyhole_tensor t = tensor_of(rows.data() + (tokens.n - 1) * kDim, tokens.n, kKvHeads, kDim);
    t.strides[0] = -ptrdiff_t{kDim};
    t.strides[1] = 0;
    return t;
  };
  Output out{std::vector<float>(expected.o.size(), NAN),
             std::vector<float>(expected.lse.size(), NAN)};
  const keyhole_tensor tq = tensor_of(tokens.q.data(), tokens.n, kHeads, kDim), tk = backwards(k),
                       tv = backwards(v), to = tensor_of(out.o.data(), tokens.n, kHeads, kDim);
  ASSERT_OK(keyhole_prompt_attend(prompt.p, 0, &tq, &tk, &tv, &to, out.lse.data(), nullptr));
  EXPECT_EQ(out, expected);
}

}  // namespace
}  // namespace keyhole::test
