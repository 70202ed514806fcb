// Attention of layers as models have them (learned sinks, alternating windows, soft-caps) through the C API alone,
// beside what Hugging Face transformers computes: golden/attention.json, written by golden/make_attention.py.
#include <fstream>

#include "runtime/files/json.h"
#include "tests/runtime/fixture.h"
#include "tests/runtime/session/recurrence.h"

namespace keyhole::test {
namespace {

struct LayerRows {
  std::vector<float> k, v, q;
};

class LayerGolden : public ::testing::TestWithParam<keyhole_mode> {};

TEST_P(LayerGolden, AttentionIsThatOfTransformers) {
  std::ifstream file(KEYHOLE_GOLDEN_FOLDER "/attention.json");
  const nlohmann::json golden = nlohmann::json::parse(file);
  const auto tokens = golden["tokens"].get<int64_t>();
  const auto checked = golden["checked"].get<std::vector<int64_t>>();
  for (const nlohmann::json& family : golden["families"]) {
    SCOPED_TRACE(family["name"].get<std::string>());
    keyhole_engine_config c = small_engine();
    c.layers = static_cast<uint32_t>(family["layers"].size());
    c.q_heads = family["q_heads"];
    c.kv_heads = family["kv_heads"];
    c.head_dim = family["head_dim"];
    c.scale = family["scale"];
    c.softcap = family["softcap"];
    std::vector<keyhole_layer_config> layers(c.layers);
    std::vector<float> sinks;
    std::vector<LayerRows> rows(c.layers);
    Recurrence numbers(family["seed"].get<uint32_t>());
    const auto n = static_cast<size_t>(tokens);
    for (uint32_t l = 0; l < c.layers; ++l) {
      keyhole_layer_config_init(&layers[l], &c);
      layers[l].window = family["layers"][l]["window"];
      rows[l].k = numbers.many(n * c.kv_heads * c.head_dim);
      rows[l].v = numbers.many(rows[l].k.size());
      rows[l].q = numbers.many(n * c.q_heads * c.head_dim);
      for (float& x : rows[l].q) x /= 8.0F;
      if (family["layers"][l]["sinks"].empty()) continue;
      const auto own = family["layers"][l]["sinks"].get<std::vector<float>>();
      EXPECT_EQ(own, numbers.many(c.q_heads)) << "the recurrence is the script's";
      sinks.insert(sinks.end(), own.begin(), own.end());
    }
    c.layer_configs = layers.data();
    c.layer_count = c.layers;
    if (!sinks.empty()) c.sink_logits = sinks.data();
    const EnginePtr engine = make_engine(c);
    keyhole_session_config sc = small_session();
    sc.mode = GetParam();
    const SessionPtr s = make_session(engine.get(), sc);
    for (uint32_t l = 0; l < c.layers; ++l) {
      size_t next = 0;
      for (int64_t t = 0; t < tokens; ++t) {
        const auto part = [t](const std::vector<float>& all, int64_t heads, int64_t d) {
          return std::vector<float>(all.begin() + t * heads * d, all.begin() + (t + 1) * heads * d);
        };
        const int64_t hq = c.q_heads, hkv = c.kv_heads, d = c.head_dim;
        const auto k = part(rows[l].k, hkv, d), v = part(rows[l].v, hkv, d),
                   q = part(rows[l].q, hq, d);
        std::vector<float> out(q.size());
        const auto tk = tensor(k, {hkv, d}), tv = tensor(v, {hkv, d}), tq = tensor(q, {hq, d}),
                   to = tensor(out, {hq, d});
        // The first tokens come as a prompt.
        if (t < checked[3]) {
          const auto pk = tensor(k, {1, hkv, d}), pv = tensor(v, {1, hkv, d});
          ASSERT_OK(keyhole_session_append(s.get(), l, &pk, &pv, nullptr));
          ASSERT_OK(keyhole_session_attend(s.get(), l, &tq, nullptr, nullptr, &to, nullptr));
        } else {
          ASSERT_OK(keyhole_session_attend(s.get(), l, &tq, &tk, &tv, &to, nullptr));
        }
        if (next == checked.size() || checked[next] != t) continue;
        const nlohmann::json& heads = family["layers"][l]["outputs"][next++];
        for (size_t h = 0; h < c.q_heads; ++h) {
          const auto want = heads[h].get<std::vector<double>>();
          EXPECT_NEAR(out[h * 64], want[0], 2e-5) << "layer " << l << ", token " << t;
          EXPECT_NEAR(out[h * 64 + 31], want[1], 2e-5) << "layer " << l << ", token " << t;
          EXPECT_NEAR(out[h * 64 + 63], want[2], 2e-5) << "layer " << l << ", token " << t;
        }
      }
      EXPECT_EQ(next, checked.size());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Modes, LayerGolden,
                         ::testing::Values(KEYHOLE_MODE_INDEXED, KEYHOLE_MODE_EXACT),
                         [](const auto& mode) {
                           return mode.param == KEYHOLE_MODE_EXACT ? "exact" : "indexed";
                         });

}  // namespace
}  // namespace keyhole::test
