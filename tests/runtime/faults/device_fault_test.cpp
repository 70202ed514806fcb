// Every call that touches the device, with the n-th request for device memory, pinned memory, or the n-th launch or
// copy refused, for every n until none is (under a sanitizer every fourth), on the device of
// tests/runtime/stream_device.h.
//   memory   The call goes on with the host, or says that memory ran out and has changed nothing; made again it
//            succeeds.
//   command  The call goes on with the host, or says that the device failed. The session then answers the truth, or
//            every call says the same; a copy of it has a beginning of its tokens.
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/runtime/faults/device_world.h"

namespace keyhole::test {
namespace {

using Call = std::function<keyhole_status(DeviceWorld&)>;

class DeviceFault : public ::testing::TestWithParam<Way> {
 protected:
  /// `again` puts the world back where the call can be made once more.
  void try_all(const Call& call, const Call& again = {}) {
    for (const DeviceCall kind : {DeviceCall::memory, DeviceCall::pinned, DeviceCall::command}) {
      auto world = std::make_unique<DeviceWorld>(GetParam());
      bool is_over = false;
      for (int64_t n = 0; !is_over && !HasFailure(); n += unless_sanitized(1, 4)) {
        SCOPED_TRACE("kind " + std::to_string(static_cast<int>(kind)) + ", " + std::to_string(n) +
                     " calls before");
        try_one(world, kind, n, call, is_over);
        if (HasFailure() || is_over) break;
        if (again) {
          ASSERT_OK(again(*world));
        }
      }
    }
  }
  void try_one(std::unique_ptr<DeviceWorld>& world, DeviceCall kind, int64_t n, const Call& call,
               bool& is_over) {
    DeviceWorld& w = *world;
    const std::string settings = w.settings();
    w.refusal.plant(kind, n);
    const keyhole_status status = call(w);
    const bool has_struck = w.refusal.lift();
    is_over = !has_struck;
    if (status != KEYHOLE_OK) {
      ASSERT_TRUE(has_struck) << keyhole_last_error();
      ASSERT_EQ(status, static_cast<keyhole_status>(w.refusal.status())) << keyhole_last_error();
      ASSERT_NE(std::strlen(keyhole_last_error()), 0U);
    }
    // A call that went well may also have waited for a stream that failed, for example a copy.
    if (has_struck && kind == DeviceCall::command && w.has_failed()) {
      w.check_failed();
      world = std::make_unique<DeviceWorld>(GetParam());
      return;
    }
    if (status == KEYHOLE_OK) return w.check();
    EXPECT_EQ(w.settings(), settings) << "of a call that failed";
    w.check();
    if (HasFailure()) return;
    ASSERT_OK(call(w));
    w.check();
  }
  /// Truncates from 1,200 tokens back to the first ones.
  static keyhole_status shorter(DeviceWorld& w) {
    return w.tokens() < 1200 ? KEYHOLE_OK : w.truncate(GetParam().has_codes ? 600 : 200);
  }
};

TEST_P(DeviceFault, Create) {
  try_all([](DeviceWorld& w) { return w.create(); });
}

TEST_P(DeviceFault, Prefill) {
  try_all([](DeviceWorld& w) { return w.prefill(1, 300); }, shorter);
}

TEST_P(DeviceFault, StepsInHostMemory) {
  try_all([](DeviceWorld& w) { return w.host_step(0); }, shorter);
}

TEST_P(DeviceFault, StepsOnAStream) {
  try_all([](DeviceWorld& w) { return w.stream_token(); }, shorter);
  // One of several tokens makes the windows overflow.
  try_all(
      [](DeviceWorld& w) -> keyhole_status {
        keyhole_status failed = KEYHOLE_OK;
        for (int i = 0; i < 4; ++i) {
          const keyhole_status status = w.stream_token();
          if (status == KEYHOLE_DEVICE_ERROR) return status;
          if (status != KEYHOLE_OK) failed = status;
        }
        return failed;
      },
      [](DeviceWorld& w) {
        const keyhole_status status = shorter(w);
        return status != KEYHOLE_OK ? status : w.fill_windows();
      });
}

TEST_P(DeviceFault, Graphs) {
  try_all([](DeviceWorld& w) { return w.graph(); }, shorter);
}

TEST_P(DeviceFault, Build) {
  try_all([](DeviceWorld& w) { return w.build(); },
          [](DeviceWorld& w) {
            const keyhole_status status = w.call(
                [](keyhole_session* s) { return keyhole_session_set_index(s, GetParam().spec); });
            return status != KEYHOLE_OK ? status : w.prefill(0, 40);
          });
}

TEST_P(DeviceFault, Truncate) {
  try_all([](DeviceWorld& w) { return w.truncate(150); },
          [](DeviceWorld& w) {
            for (uint32_t l = 0; l < 2; ++l) {
              if (const auto s = w.prefill(l, 600)) return s;
            }
            return w.build();
          });
}

TEST_P(DeviceFault, Settings) {
  const auto set_index = [](const char* spec) {
    return [=](DeviceWorld& w) {
      return w.call([&](keyhole_session* s) { return keyhole_session_set_index(s, spec); });
    };
  };
  const bool has_codes = GetParam().has_codes;
  try_all(set_index(has_codes ? "codes:k=4,v=4" : "ivf:C=8,probe=16777216"), [&](DeviceWorld& w) {
    const auto status = set_index(GetParam().spec)(w);
    return status != KEYHOLE_OK ? status : w.build();
  });
  const auto set_mode = [](keyhole_mode mode) {
    return [=](DeviceWorld& w) {
      return w.call([&](keyhole_session* s) { return keyhole_session_set_mode(s, mode, 0); });
    };
  };
  try_all(set_mode(KEYHOLE_MODE_EXACT), set_mode(KEYHOLE_MODE_INDEXED));
  const auto set_top_k = [](uint32_t top_k) {
    return [=](DeviceWorld& w) {
      keyhole_budget b = w.budget();
      b.top_k = top_k;
      return w.call([&](keyhole_session* s) {
        return keyhole_session_set_budget(s, KEYHOLE_ALL, KEYHOLE_ALL, &b);
      });
    };
  };
  // From none on the device to all, or with more of them.
  try_all(set_top_k(has_codes ? 32 : 4096), set_top_k(has_codes ? 65 : 4000));
}

TEST_P(DeviceFault, Copies) {
  for (const bool through_file : {false, true}) {
    try_all([=](DeviceWorld& w) { return w.copy(through_file); });
  }
}

INSTANTIATE_TEST_SUITE_P(Ways, DeviceFault,
                         ::testing::ValuesIn(unless_sanitized(
                             std::vector<Way>{
                                 {"flat", "flat", KEYHOLE_PLACE_AUTO},
                                 {"codes", "codes:k=2,v=2", KEYHOLE_PLACE_AUTO, true},
                                 {"sliding", "flat", KEYHOLE_PLACE_AUTO, false, false, true},
                                 {"codes_required", "codes:k=2,v=2", KEYHOLE_PLACE_DEVICE, true},
                                 {"partitions", "flat", KEYHOLE_PLACE_AUTO, false, true}},
                             2)),
                         [](const auto& p) { return std::string(p.param.name); });

}  // namespace
}  // namespace keyhole::test
