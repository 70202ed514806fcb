// libFuzzer: any bytes are either a saved session, which can be used then, or refused by an Error.
// Checksums are not looked at. Two programs: sessions uses what it has loaded, session_files does not, and is many
// times as fast. At its start it writes sessions of every index type into the first folder that it is given, unless
// that has files.
#include <sys/prctl.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "index/serial.h"
#include "keyhole/save.h"
#include "runtime/api/api_objects.h"
#include "runtime/session/session_file.h"

namespace {

using keyhole::Error;
using keyhole::Status;

constexpr uint32_t kHeads = 2, kDim = 64;

void require(bool ok) {
  if (!ok) std::abort();
}

keyhole_engine* engine() {
  static keyhole_engine* const made = [] {
    keyhole_engine_config c;
    keyhole_engine_config_init(&c);
    c.layers = 1;
    c.q_heads = kHeads;
    c.kv_heads = 1;
    c.head_dim = kDim;
    c.threads = 1;
    c.device = KEYHOLE_DEVICE_HOST;
    keyhole_engine* e = nullptr;
    require(keyhole_engine_create(&c, &e) == KEYHOLE_OK);
    return e;
  }();
  return made;
}

/// The same numbers for every call: only whether a session answers is looked at, not what. Keys repeat after 17
/// tokens, so that graphs have twins.
keyhole_tensor numbers(int64_t tokens, int64_t heads, bool as_step) {
  static const std::vector<float> data = [] {
    std::vector<float> v(size_t{400} * kHeads * kDim);
    for (size_t i = 0; i < v.size(); ++i)
      v[i] = static_cast<float>(i % (17 * kDim) * 2654435761U % 129) / 64.0F - 1.0F;
    return v;
  }();
  const int64_t shape[] = {tokens, heads, kDim};
  return keyhole_tensor_host(data.data(), KEYHOLE_F32, as_step ? 2 : 3, shape + (as_step ? 1 : 0));
}

/// Keys and values may be as large as fp32 allows, and their products be beyond it.
void expect_allowed(keyhole_status status) {
  require(status == KEYHOLE_OK || status == KEYHOLE_INVALID_ARGUMENT ||
          status == KEYHOLE_OUT_OF_MEMORY || status == KEYHOLE_NOT_FINITE);
}

void use(keyhole_session* session) {
  const keyhole_tensor q = numbers(1, kHeads, true), kv = numbers(1, 1, true);
  std::vector<float> o(kHeads * kDim);
  const int64_t shape[] = {kHeads, kDim};
  const keyhole_tensor out = keyhole_tensor_host(o.data(), KEYHOLE_F32, 2, shape);
  for (int i = 0; i < 4; ++i) {
    expect_allowed(keyhole_session_attend(session, 0, &q, &kv, &kv, &out, nullptr));
  }
  keyhole_session* copy = nullptr;
  expect_allowed(keyhole_session_fork(session, &copy));
  keyhole_session_destroy(copy);
  expect_allowed(keyhole_session_truncate(session, 30));
  expect_allowed(keyhole_session_attend(session, 0, &q, &kv, &kv, &out, nullptr));
}

keyhole_session* make_session(const char* spec, uint32_t tokens) {
  keyhole_session_config c;
  keyhole_session_config_init(&c);
  c.max_tokens = 1024;
  c.sink = 2;
  c.window = 4;
  c.flush_block = 2;
  c.index = spec;
  c.training_queries = 8;
  keyhole_session* session = nullptr;
  require(keyhole_session_create(engine(), &c, &session) == KEYHOLE_OK);
  const keyhole_tensor q = numbers(tokens, kHeads, false), kv = numbers(tokens, 1, false);
  require(keyhole_session_append(session, 0, &kv, &kv, &q) == KEYHOLE_OK);
  require(keyhole_session_build(session, nullptr, nullptr) == KEYHOLE_OK);
  return session;
}

void write_corpus(const std::filesystem::path& folder) {
  if (!std::filesystem::is_directory(folder) || !std::filesystem::is_empty(folder)) return;
  int number = 0;
  for (const char* spec :
       {"flat", "flat:codec=int8", "ivf:C=4,probe=2", "hnsw:M=4,efc=8", "roargraph:M=4,ef=8",
        "sparq:r=4", "codes:k=2,v=2", "codes:k=2,v=2,lists=16"}) {
    keyhole_session* session = make_session(spec, number >= 6 ? 270 : 30);
    require(keyhole_session_save(session, (folder / std::to_string(number++)).c_str()) ==
            KEYHOLE_OK);
    keyhole_session_destroy(session);
  }
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  // A session touches the first bytes of arrays that the system would give whole pages of 2 MiB, cleared.
  (void)prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0);
  keyhole::index::checks_sums = false;
  for (int i = 1; i < *argc; ++i) {
    if ((*argv)[i][0] == '-') continue;
    write_corpus((*argv)[i]);
    break;
  }
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::unique_ptr<keyhole::runtime::Session> session;
  try {
    const keyhole::runtime::MemorySource source(std::as_bytes(std::span(data, size)));
    session = keyhole::runtime::load_session(engine()->engine, source);
  } catch (const Error& e) {
    require(*e.what() != '\0' && e.status() != Status::internal);
    return 0;
  }
  if (KEYHOLE_FUZZ_USES) {
    keyhole_session handle(std::move(session), engine()->sessions);
    use(&handle);
  }
  return 0;
}
