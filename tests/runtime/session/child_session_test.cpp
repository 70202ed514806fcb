// Sessions saved as what differs from another saved one: a load gives what a whole file gives, bit for bit, and other parents are
// refused.
#include <filesystem>
#include <fstream>
#include <iterator>

#include "tests/runtime/fixture.h"
#include "tests/temporary_folder.h"

namespace keyhole::test {
namespace {

constexpr uint32_t kParentTokens = unless_sanitized(3000, 1500);

std::string bytes_of(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}
void write(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

class ChildSession : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    sc_.index = GetParam();
    sc_.training_queries = 16;
    sc_.budget.top_k = 20;
    parent_ = make_session(engine_.get(), sc_);
    grow(parent_.get(), kParentTokens);
    ASSERT_OK(keyhole_session_set_identity(parent_.get(), "a model", nullptr, 0));
    ASSERT_OK(keyhole_save(parent_.get(), parent_path_.c_str()));
  }
  [[nodiscard]] std::string file(const char* name) const { return folder_ / name; }
  void grow(keyhole_session* s, uint32_t n) {
    Model unused(ec_);
    for (uint32_t l = 0; l < ec_.layers; ++l) prefill_both(s, unused, shape_, l, n, numbers_);
    EXPECT_OK(keyhole_build(s, nullptr, nullptr));
  }
  static SessionPtr fork(keyhole_session* s) {
    keyhole_session* copy = nullptr;
    EXPECT_OK(keyhole_fork(s, &copy));
    return SessionPtr(copy);
  }
  [[nodiscard]] keyhole_status save(keyhole_session* s, const std::string& path,
                                    const std::vector<const char*>& parents) {
    return keyhole_save_child(s, path.c_str(), parents.data(),
                              static_cast<uint32_t>(parents.size()));
  }
  [[nodiscard]] keyhole_status load(const std::string& path,
                                    const std::vector<const char*>& parents, SessionPtr& out,
                                    const char* model = nullptr) {
    keyhole_session* loaded = nullptr;
    const auto status =
        keyhole_load_child(engine_.get(), path.c_str(), parents.data(),
                           static_cast<uint32_t>(parents.size()), model, nullptr, 0, &loaded);
    EXPECT_EQ(loaded != nullptr, status == KEYHOLE_OK);
    out.reset(loaded);
    return status;
  }
  [[nodiscard]] keyhole_status load_status(const std::string& path,
                                           const std::vector<const char*>& parents) {
    SessionPtr unused;
    return load(path, parents, unused);
  }
  /// All that a file has of it, and what it answers.
  void expect_same(keyhole_session* a, keyhole_session* b) {
    const std::string x = file("x"), y = file("y");
    ASSERT_OK(keyhole_save(a, x.c_str()));
    ASSERT_OK(keyhole_save(b, y.c_str()));
    EXPECT_EQ(bytes_of(x), bytes_of(y));
    for (uint32_t l = 0; l < ec_.layers; ++l) {
      const auto q = numbers_.many(shape_.q(1));
      const Answer left = attend_only(a, shape_, l, q), right = attend_only(b, shape_, l, q);
      EXPECT_EQ(left.o, right.o);
      EXPECT_EQ(left.lse, right.lse);
    }
  }

  keyhole_engine_config ec_ = small_engine();
  keyhole_session_config sc_ = small_session();
  EnginePtr engine_ = make_engine(ec_);
  Numbers numbers_{31};
  Shape shape_{ec_};
  TemporaryFolder folder_;
  const std::string parent_path_ = folder_ / "parent.kv";
  const char* const parent_name_ = parent_path_.c_str();
  SessionPtr parent_;
};

TEST_P(ChildSession, IsTheWholeSession) {
  const SessionPtr child = fork(parent_.get());
  grow(child.get(), 70);
  const std::string path = file("child.kv"), whole = file("whole.kv");
  ASSERT_OK(save(child.get(), path, {parent_name_}));
  ASSERT_OK(keyhole_save(child.get(), whole.c_str()));
  SessionPtr loaded;
  ASSERT_OK(load(path, {parent_name_}, loaded, "a model"));
  expect_same(child.get(), loaded.get());
  // It goes on as the child does.
  grow(child.get(), 0 + 1);
  EXPECT_EQ(layer_tokens(loaded.get(), 0).total, kParentTokens + 70);

  // Its file has what is its own: what a whole one has more, the window, which moves, and up to two anchors' distance for
  // each array. An index that is made anew is another one.
  const uint64_t size = std::filesystem::file_size(path), all = std::filesystem::file_size(whole);
  const std::string spec = GetParam();
  if (spec == "flat" || spec.starts_with("codes")) {
    const uint64_t arrays = uint64_t{ec_.layers} * ec_.kv_heads * 4;
    EXPECT_LT(size, all - std::filesystem::file_size(parent_path_) + arrays * 8400 + 20000);
  }
  const uint64_t kv = uint64_t{2} * kParentTokens * ec_.kv_heads * ec_.head_dim * 2 * ec_.layers;
  EXPECT_LT(size + kv * 9 / 10, all);

  // A whole file is no other than it was for these calls, and a child's is none for the others.
  ASSERT_OK(load(whole, {}, loaded));
  ASSERT_OK(load(whole, {parent_name_}, loaded));
  keyhole_session* none = nullptr;
  EXPECT_EQ(keyhole_load(engine_.get(), path.c_str(), &none), KEYHOLE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(keyhole_last_error()).find("parent.kv"), std::string::npos)
      << keyhole_last_error();
}

TEST_P(ChildSession, MayBeAParentAndComeFromAFile) {
  SessionPtr loaded;
  ASSERT_OK(load(parent_path_, {}, loaded));
  ASSERT_OK(keyhole_truncate(loaded.get(), kParentTokens - 200));
  grow(loaded.get(), 100);
  const std::string child = file("child.kv"), grandchild = file("grandchild.kv");
  ASSERT_OK(save(loaded.get(), child, {parent_name_}));
  grow(loaded.get(), 100);
  ASSERT_OK(save(loaded.get(), grandchild, {child.c_str(), parent_name_}));
  EXPECT_LT(std::filesystem::file_size(grandchild), std::filesystem::file_size(parent_path_) / 2);
  SessionPtr again;
  ASSERT_OK(load(grandchild, {child.c_str(), parent_name_}, again));
  expect_same(loaded.get(), again.get());
  EXPECT_EQ(load_status(grandchild, {child.c_str()}), KEYHOLE_INVALID_ARGUMENT);
  EXPECT_EQ(load_status(grandchild, {parent_name_}), KEYHOLE_INVALID_ARGUMENT);
  EXPECT_EQ(load_status(grandchild, {parent_name_, child.c_str()}), KEYHOLE_INVALID_ARGUMENT);
}

INSTANTIATE_TEST_SUITE_P(Types, ChildSession,
                         ::testing::ValuesIn(unless_sanitized(
                             std::vector<const char*>{"flat", "ivf:C=16,probe=4", "codes:k=2,v=2",
                                                      "hnsw:M=6,efc=20", "sparq:r=8"},
                             2)));

class ChildFiles : public ChildSession {};

TEST_P(ChildFiles, OtherParentsAreRefused) {
  const SessionPtr child = fork(parent_.get());
  grow(child.get(), 50);
  const std::string path = file("child.kv"), other = file("other.kv");
  ASSERT_OK(save(child.get(), path, {parent_name_}));
  const auto refused = [&](const std::vector<const char*>& parents, keyhole_status status,
                           const std::string& text) {
    EXPECT_EQ(load_status(path, parents), status);
    EXPECT_NE(std::string(keyhole_last_error()).find(text), std::string::npos)
        << keyhole_last_error();
  };
  const std::string parent = bytes_of(parent_path_);
  const std::string size = std::to_string(parent.size()) + " bytes with checksum ";
  ASSERT_OK(keyhole_save(child.get(), other.c_str()));
  refused({other.c_str()}, KEYHOLE_INVALID_ARGUMENT, size);
  refused({other.c_str()}, KEYHOLE_INVALID_ARGUMENT,
          "the one given has " + std::to_string(std::filesystem::file_size(other)) + " bytes");
  refused({}, KEYHOLE_INVALID_ARGUMENT, size);
  refused({file("none.kv").c_str()}, KEYHOLE_IO, "none.kv");
  refused({nullptr}, KEYHOLE_INVALID_ARGUMENT, "parents[0] is NULL");

  // Moved and renamed it is the same parent; changed, where the child uses it, or cut, it is not.
  write(other, parent);
  EXPECT_EQ(load_status(path, {other.c_str()}), KEYHOLE_OK);
  std::string changed = parent;
  changed[parent.size() / 3] = static_cast<char>(changed[parent.size() / 3] ^ 1);
  write(other, changed);
  refused({other.c_str()}, KEYHOLE_CORRUPT, other);
  EXPECT_EQ(save(child.get(), file("no.kv"), {other.c_str()}), KEYHOLE_CORRUPT);
  EXPECT_FALSE(std::filesystem::exists(file("no.kv")));
  write(other, parent.substr(0, parent.size() - 1));
  refused({other.c_str()}, KEYHOLE_INVALID_ARGUMENT, size);
  // The child's own bytes.
  const std::string own = bytes_of(path);
  for (const size_t at : {own.size() / 5, own.size() / 2, own.size() - 20}) {
    std::string bad = own;
    bad[at] = static_cast<char>(bad[at] ^ 4);
    write(path, bad);
    EXPECT_EQ(load_status(path, {parent_name_}), KEYHOLE_CORRUPT) << at;
  }
  for (size_t n = 0; n < own.size(); n = n * 5 / 4 + 1) {
    write(path, own.substr(0, n));
    EXPECT_EQ(load_status(path, {parent_name_}), KEYHOLE_CORRUPT) << n;
  }
}

TEST_P(ChildFiles, AParentIsNotReplacedByItsChild) {
  const std::string before = bytes_of(parent_path_), path = file("child.kv");
  EXPECT_EQ(save(parent_.get(), parent_path_, {parent_name_}), KEYHOLE_INVALID_ARGUMENT);
  EXPECT_EQ(save(parent_.get(), file("./parent.kv"), {parent_name_}), KEYHOLE_INVALID_ARGUMENT);
  EXPECT_EQ(save(parent_.get(), path, {}), KEYHOLE_INVALID_ARGUMENT);
  EXPECT_EQ(save(parent_.get(), path, {file("none.kv").c_str()}), KEYHOLE_IO);
  EXPECT_EQ(bytes_of(parent_path_), before);
  EXPECT_FALSE(std::filesystem::exists(path));
  // Of what is the parent itself little is left.
  ASSERT_OK(save(parent_.get(), path, {parent_name_}));
  EXPECT_LT(std::filesystem::file_size(path), 300U);
  ASSERT_OK(save(parent_.get(), path, {parent_name_}));  // an old child is replaced
  EXPECT_EQ(load_status(path, {parent_name_}), KEYHOLE_OK);
  const auto mode = std::filesystem::status(path).permissions();
  EXPECT_EQ(mode, std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
}

INSTANTIATE_TEST_SUITE_P(Codes, ChildFiles, ::testing::Values("codes:k=2,v=2"));

}  // namespace
}  // namespace keyhole::test
