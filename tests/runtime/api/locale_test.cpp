// A program whose locale writes 1,5 for one and a half: what it is told stays JSON.
#include <clocale>
#include <cstdlib>
#include <string>

#include "keyhole/index.h"
#include "runtime/files/json.h"
#include "tests/runtime/fixture.h"
#include "tests/temporary_folder.h"

namespace keyhole::test {
namespace {

/// A locale with a comma while it lives, made here where the machine has none.
class CommaLocale {
 public:
  CommaLocale() : before_(setlocale(LC_ALL, nullptr)) {
    if (setlocale(LC_ALL, "de_DE.UTF-8") == nullptr) {
      const std::string made = folder_ / "de_DE.UTF-8";
      const std::string command =
          "localedef -i de_DE -f UTF-8 '" + made + "' >'" + (folder_ / "log").string() + "' 2>&1";
      if (std::system(command.c_str()) != 0) return;
      setenv("LOCPATH", folder_.path().c_str(), 1);
      if (setlocale(LC_ALL, "de_DE.UTF-8") == nullptr) return;
    }
    is_there_ = std::to_string(1.5).find(',') != std::string::npos;
  }
  ~CommaLocale() {
    setlocale(LC_ALL, before_.c_str());
    unsetenv("LOCPATH");
  }
  CommaLocale(const CommaLocale&) = delete;
  CommaLocale& operator=(const CommaLocale&) = delete;
  [[nodiscard]] bool is_there() const { return is_there_; }

 private:
  TemporaryFolder folder_;
  std::string before_;
  bool is_there_ = false;
};

TEST(Locale, DiagnosticsAreJsonInEveryLocale) {
  const CommaLocale comma;
  if (!comma.is_there()) GTEST_SKIP() << "no locale with a comma, and no localedef";
  const keyhole_engine_config config = small_engine();
  const EnginePtr engine = make_engine(config);
  Numbers numbers(3);
  const std::vector<float> keys = numbers.many(size_t{300} * config.head_dim);
  const auto tensor_of_keys = tensor(keys, {300, config.head_dim});
  size_t fractions = 0;
  for (const char* spec : {"ivf:C=7", "hnsw:M=8", "roargraph:M=8", "codes"}) {
    SCOPED_TRACE(spec);
    keyhole_index* index = nullptr;
    ASSERT_OK(keyhole_index_create(engine.get(), spec, 0, 0, &index));
    ASSERT_OK(keyhole_index_build(index, &tensor_of_keys, nullptr, nullptr, nullptr, 0, nullptr,
                                  nullptr));
    keyhole_index_info info;
    keyhole_index_info_init(&info);
    ASSERT_OK(keyhole_index_get_info(index, &info));
    const auto json = nlohmann::json::parse(info.diagnostics, nullptr, false);
    ASSERT_TRUE(json.is_object() && !json.empty()) << info.diagnostics;
    for (const auto& value : json) {
      EXPECT_TRUE(value.is_number()) << info.diagnostics;
      fractions += value.is_number_float() ? 1 : 0;
    }
    keyhole_index_destroy(index);
  }
  EXPECT_GT(fractions, 0U) << "no number of these could show a comma";
}

}  // namespace
}  // namespace keyhole::test
