// The plan against arithmetic done by hand, and against what a session then takes.
#include "tests/runtime/fixture.h"

namespace keyhole::test {
namespace {

keyhole_engine_config llama8b() {
  keyhole_engine_config c;
  keyhole_engine_config_init(&c);
  c.layers = 32;
  c.q_heads = 32;
  c.kv_heads = 8;
  c.head_dim = 128;
  return c;
}

keyhole_memory_plan plan(const keyhole_engine_config& e, const keyhole_session_config* s,
                         uint64_t context, uint64_t device = 0, uint64_t host = 0) {
  keyhole_memory_plan p;
  keyhole_memory_plan_init(&p);
  EXPECT_OK(keyhole_plan(&e, s, context, device, host, &p));
  return p;
}

TEST(Plan, An8BModelAt128k) {
  keyhole_session_config codes;
  keyhole_session_config_init(&codes);
  codes.index = "codes:k=4,v=4";
  codes.budget.tail = KEYHOLE_TAIL_CODES;
  const auto p = plan(llama8b(), &codes, 131072);
  EXPECT_EQ(uint64_t{16} << 30, p.kv_bytes);
  // 128 sink + 512 window + 256 block tokens of 128 KiB, and on a CUDA device states and counters. Codes of 4 bits are
  // a quarter of f16, with factors and means.
  const uint64_t cuda_resident = uint64_t{896} * 128 * 1024;
  EXPECT_GE(p.code_bytes, p.kv_bytes / 4 * 99 / 100);
  EXPECT_LE(p.code_bytes, p.kv_bytes / 4 * 105 / 100);
  EXPECT_GE(p.device_bytes - p.code_bytes, cuda_resident);
  EXPECT_LE(p.device_bytes - p.code_bytes, cuda_resident + cuda_resident / 20);
  const uint64_t resident = uint64_t{704} * 128 * 1024;
  EXPECT_GT(p.pinned_bytes, 0U);
  auto on_host = llama8b();
  on_host.device = KEYHOLE_DEVICE_HOST;
  EXPECT_EQ(resident, plan(on_host, nullptr, 131072).device_bytes);
  EXPECT_EQ(0U, plan(on_host, nullptr, 131072).pinned_bytes);
  const uint64_t offloaded = (uint64_t{131072} - 640) * 128 * 1024;
  EXPECT_GE(p.host_bytes, offloaded);
  EXPECT_LE(p.host_bytes, offloaded + offloaded / 10);
  EXPECT_EQ(1U, p.fits);
  // Lists take more than the codes.
  codes.index = "codes:k=4,v=4,lists=64";
  const auto lists = plan(llama8b(), &codes, 131072);
  EXPECT_GT(lists.code_bytes, 2 * p.code_bytes);
  EXPECT_LT(lists.code_bytes, 3 * p.code_bytes);
}

TEST(Plan, ListsMakeWayForLayers) {
  keyhole_session_config c;
  keyhole_session_config_init(&c);
  c.budget.tail = KEYHOLE_TAIL_CODES;
  for (const uint32_t place : {KEYHOLE_PLACE_AUTO, KEYHOLE_PLACE_DEVICE}) {
    c.offload_placement = place;
    c.index = "codes:k=4,v=4";
    const auto codes = plan(llama8b(), &c, 131072);
    c.index = "codes:k=4,v=4,lists=64";
    const auto lists = plan(llama8b(), &c, 131072);
    ASSERT_GT(lists.device_bytes, codes.device_bytes);
    const auto fewer = plan(llama8b(), &c, 131072, lists.device_bytes - 1);
    EXPECT_EQ(fewer.code_layers, codes.code_layers);
    EXPECT_EQ(fewer.device_bytes, codes.device_bytes);
    EXPECT_EQ(fewer.rows_by_host, 0U);
    EXPECT_EQ(fewer.fits, 1U);
  }
}

/// A card that is not here, by its compute capability: lists want room in the shared memory of a thread block, of which
/// 8.6, 8.9 and 12.0 leave too little for groups of more than 8 heads of 128 with 4 bits (enough with 2).
TEST(Plan, ACardHasListsWhereItHasKernelsForThem) {
  keyhole_session_config c;
  keyhole_session_config_init(&c);
  c.budget.tail = KEYHOLE_TAIL_CODES;
  struct Known {
    uint32_t q_heads, kv_heads, head_dim, capability;
    bool lists;
  };
  for (const Known& k :
       {Known{32, 8, 128, 0, true},   Known{32, 8, 128, 80, true},  Known{32, 8, 128, 86, true},
        Known{32, 8, 128, 89, true},  Known{32, 8, 128, 90, true},  Known{32, 8, 128, 120, true},
        Known{24, 4, 256, 89, true},  Known{24, 4, 256, 90, true},  Known{24, 4, 256, 120, true},
        Known{16, 2, 256, 86, true},  Known{32, 2, 256, 120, true}, Known{32, 2, 128, 80, true},
        Known{32, 2, 128, 86, true},  Known{32, 2, 128, 89, true},  Known{32, 2, 128, 90, true},
        Known{32, 2, 128, 100, true}, Known{32, 2, 128, 120, true}, Known{16, 1, 64, 89, true},
        Known{32, 8, 512, 90, false}, Known{32, 8, 512, 89, false}}) {
    auto e = llama8b();
    e.q_heads = k.q_heads;
    e.kv_heads = k.kv_heads;
    e.head_dim = k.head_dim;
    e.device_capability = k.capability;
    e.device = KEYHOLE_DEVICE_CUDA;
    c.index = "codes:k=4,v=4";
    const auto codes = plan(e, &c, 131072);
    c.index = "codes:k=4,v=4,lists=64,from=32768";
    const auto lists = plan(e, &c, 131072);
    EXPECT_EQ(lists.code_bytes > codes.code_bytes, k.lists)
        << k.q_heads << "/" << k.kv_heads << " of " << k.head_dim << " on " << k.capability;
    if (!k.lists) {
      EXPECT_EQ(lists.device_bytes, codes.device_bytes);
    }
  }
}

/// Layers without lists on a card that it has no room for are the host's, with the lists that their index names.
TEST(Plan, TheHostHasListsBesideACardThatHasNone) {
  keyhole_session_config c;
  keyhole_session_config_init(&c);
  c.budget.tail = KEYHOLE_TAIL_CODES;
  auto e = llama8b();
  e.q_heads = 16;
  e.kv_heads = 2;
  e.head_dim = 512;
  e.device = KEYHOLE_DEVICE_HOST;
  const auto of_index = [&](const char* index, uint64_t limit) {
    c.index = index;
    return plan(e, &c, 131072, limit);
  };
  const auto all_on_host = of_index("codes:k=4,v=4,lists=64", 0);
  ASSERT_GT(all_on_host.index_bytes, of_index("codes:k=4,v=4", 0).index_bytes);
  e.device = KEYHOLE_DEVICE_CUDA;
  const uint64_t limit = uint64_t{3} << 28U;
  const auto some = of_index("codes:k=4,v=4,lists=64", limit);
  const auto codes = of_index("codes:k=4,v=4", limit);
  ASSERT_GT(some.code_layers, 0U);
  ASSERT_LT(some.code_layers, e.layers);
  EXPECT_EQ(some.code_layers, codes.code_layers);
  EXPECT_EQ(some.device_bytes, codes.device_bytes);
  EXPECT_EQ(some.index_bytes, all_on_host.index_bytes / e.layers * (e.layers - some.code_layers));
}

// A GPU has no kernels for it: what the engine then does on the host.
TEST(Plan, AModelOfTooManyQueryHeadsForAGpuIsOneOfTheHost) {
  auto mqa = llama8b();
  mqa.q_heads = 71;
  mqa.kv_heads = 1;
  auto on_host = mqa;
  on_host.device = KEYHOLE_DEVICE_HOST;
  const auto p = plan(mqa, nullptr, 131072), h = plan(on_host, nullptr, 131072);
  EXPECT_EQ(p.device_bytes, h.device_bytes);
  EXPECT_EQ(p.host_bytes, h.host_bytes);
  EXPECT_EQ(0U, p.pinned_bytes);
  EXPECT_EQ(0U, p.code_layers);
  mqa.device = KEYHOLE_DEVICE_CUDA;
  keyhole_memory_plan none;
  keyhole_memory_plan_init(&none);
  EXPECT_EQ(KEYHOLE_UNSUPPORTED, keyhole_plan(&mqa, nullptr, 131072, 0, 0, &none));
  expect_error_text("71 query heads per KV head, allowed: 1..16");
}

TEST(Plan, TheLongestContextIsTheLongest) {
  keyhole_session_config s;
  keyhole_session_config_init(&s);
  for (const char* index : {"flat", "ivf:C=256,probe=8", "hnsw", "roargraph", "sparq", "codes"}) {
    s.index = index;
    const uint64_t host = uint64_t{40} << 30;
    const uint64_t device = uint64_t{1} << 30;
    const uint32_t longest = plan(llama8b(), &s, 1000, device, host).longest_context;
    EXPECT_GT(longest, 100000U);
    EXPECT_EQ(1U, plan(llama8b(), &s, longest, device, host).fits);
    EXPECT_EQ(0U, plan(llama8b(), &s, uint64_t{longest} + 1, device, host).fits);
  }
  EXPECT_EQ(0U, plan(llama8b(), &s, 1000, 1 << 20, 0).longest_context);
}

TEST(Plan, ForeseesWhatASessionTakes) {
  const auto ec = small_engine();
  auto sc = small_session();
  sc.index = "ivf:C=16,probe=4";
  sc.budget.top_k = 50;
  for (const auto& [attend, tail] : {std::pair(KEYHOLE_ATTEND_TOPK, KEYHOLE_TAIL_NONE),
                                     std::pair(KEYHOLE_ATTEND_SCORED, KEYHOLE_TAIL_NONE),
                                     std::pair(KEYHOLE_ATTEND_TOPK, KEYHOLE_TAIL_SECOND)}) {
    sc.budget.attend = attend;
    sc.budget.tail = tail;
    sc.audit_share = attend == KEYHOLE_ATTEND_TOPK ? 0.0 : 1.0;
    const EnginePtr engine = make_engine(ec);
    const SessionPtr session = make_session(engine.get(), sc);
    Numbers numbers(4);
    Model model(ec);
    const Shape shape(ec);
    for (uint32_t l = 0; l < ec.layers; ++l)
      prefill_both(session.get(), model, shape, l, 3000, numbers);
    ASSERT_OK(keyhole_session_build(session.get(), nullptr, nullptr));
    const auto p = plan(ec, &sc, 3000);
    const auto st = statistics(session.get());
    EXPECT_EQ(p.device_bytes, st.device_bytes);
    EXPECT_NEAR(static_cast<double>(p.index_bytes), static_cast<double>(st.index_bytes),
                0.15 * static_cast<double>(st.index_bytes));
    EXPECT_NEAR(static_cast<double>(p.host_bytes), static_cast<double>(st.host_bytes),
                0.15 * static_cast<double>(st.host_bytes));
  }
}

TEST(Plan, RefusesNonsense) {
  keyhole_memory_plan p;
  keyhole_memory_plan_init(&p);
  auto e = llama8b();
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_plan(&e, nullptr, uint64_t{1} << 40, 0, 0, &p));
  e.head_dim = 7;
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_plan(&e, nullptr, 1000, 0, 0, &p));
  e = llama8b();
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_plan(nullptr, nullptr, 1000, 0, 0, &p));
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_plan(&e, nullptr, 1000, 0, 0, nullptr));
  // 2^31 tokens of the largest shape pass 2^63 bytes only with sink and window at their limits.
  e.layers = 1024;
  e.q_heads = e.kv_heads = 4096;
  e.head_dim = 256;
  e.kv_dtype = KEYHOLE_F32;
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_plan(&e, nullptr, uint64_t{1} << 31, 0, 0, &p));
  for (const uint32_t capability : {8U, 75U, 1000U}) {
    e = llama8b();
    e.device_capability = capability;
    EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_plan(&e, nullptr, 1000, 0, 0, &p));
    expect_error_text("device_capability is " + std::to_string(capability));
  }
  // What is to lie on the device must have codes.
  e = llama8b();
  keyhole_session_config s;
  keyhole_session_config_init(&s);
  s.offload_placement = KEYHOLE_PLACE_DEVICE;
  EXPECT_OK(keyhole_plan(&e, &s, 1000, 0, 0, &p));
  s.index = "ivf";
  EXPECT_EQ(KEYHOLE_INVALID_ARGUMENT, keyhole_plan(&e, &s, 1000, 0, 0, &p));
  expect_error_text("KEYHOLE_PLACE_DEVICE");
}

}  // namespace
}  // namespace keyhole::test
