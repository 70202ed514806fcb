#include "tools/generation/saved_session.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <optional>
#include <ostream>
#include <stdexcept>
#include <vector>

#include "runtime/files/json.h"
#include "runtime/files/replace_file.h"
#include "runtime/files/write_target.h"
#include "tools/tokenizer/unicode.h"

namespace keyhole::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int kVersion = 1;

/// While one lives, files are made for their owner alone. It holds for the whole process, including what other
/// threads create then.
class ForOwnerAlone {
 public:
  ForOwnerAlone() : before_(umask(077)) {}
  ~ForOwnerAlone() { umask(before_); }
  ForOwnerAlone(const ForOwnerAlone&) = delete;
  ForOwnerAlone& operator=(const ForOwnerAlone&) = delete;

 private:
  mode_t before_;
};

/// What tells one session file from another: its last 8 bytes, the library's checksum of all others.
std::string end_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  file.seekg(-8, std::ios::end);
  char bytes[8];
  if (!file.read(bytes, sizeof bytes)) throw std::runtime_error(path.string() + ": cannot be read");
  std::string text;
  for (const char byte : bytes) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", static_cast<unsigned char>(byte));
    text += digits;
  }
  return text;
}

/// "notes.kv0", or kv1 where the file `path` names the other.
fs::path next_kv_of(const fs::path& path) {
  const fs::path first = path.string() + ".kv0";
  try {
    return read_session(path).kv.filename() == first.filename() ? path.string() + ".kv1"
                                                                : first.string();
  } catch (const std::exception&) {
    return first;  // no file yet, or none that is worth keeping
  }
}

/// What the file `path` calls `kv`: its name, or the end ".kv0" alone where the name is no UTF-8, which JSON cannot
/// hold.
std::string kv_name_of(const fs::path& path, const fs::path& kv) {
  const std::string name = kv.filename().string();
  if (is_utf8(name)) return name;
  return name.substr(path.filename().string().size());
}

/// Removes a session of the library with those of its ranks, which lie beside it under longer names.
void remove_kv(const fs::path& file) {
  std::error_code ignored;
  const std::string beginning = file.filename().string() + ".";
  const fs::path folder = file.has_parent_path() ? file.parent_path() : fs::path(".");
  std::vector<fs::path> all{file};
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, ignored)) {
    const std::string name = entry.path().filename();
    if (name.starts_with(beginning) && name.find("-of-") != std::string::npos) {
      all.push_back(entry.path());
    }
  }
  for (const fs::path& path : all) fs::remove(path, ignored);
}

/// A field of the file, or an error that says which is missing or of another kind.
template <class T>
T take(const json& root, const char* name, const fs::path& path) {
  try {
    return root.at(name).get<T>();
  } catch (const json::exception&) {
    throw std::runtime_error(path.string() + ": no saved session: \"" + name +
                             "\" is missing, or is no such value");
  }
}

/// Token ids: whole numbers below 2^32, which get<uint32_t> would not insist on.
std::vector<uint32_t> take_tokens(const json& root, const fs::path& path) {
  const auto values = take<std::vector<json>>(root, "tokens", path);
  std::vector<uint32_t> tokens;
  tokens.reserve(values.size());
  for (const json& value : values) {
    if (!value.is_number_unsigned() || value.get<uint64_t>() > UINT32_MAX) {
      throw std::runtime_error(path.string() + ": token " + std::to_string(tokens.size()) + " is " +
                               value.dump() + ", allowed: token ids");
    }
    tokens.push_back(value.get<uint32_t>());
  }
  return tokens;
}

uint64_t whole_number(const json& value, const std::string& what, const fs::path& path) {
  if (value.is_number_unsigned()) return value.get<uint64_t>();
  throw std::runtime_error(path.string() + ": " + what + " is " + value.dump() +
                           ", allowed: a whole number from 0");
}

/// Draws are made again one by one, some hundred million in a second, so the number that a file may ask for is
/// bounded.
SamplerState take_sampler(const json& value, const fs::path& path) {
  constexpr uint64_t kMostDraws = uint64_t{1} << 32U;
  const auto number = [&](const char* name) {
    return whole_number(value.is_object() && value.contains(name) ? value[name] : json(),
                        std::string("\"sampler\" has \"") + name + "\", which", path);
  };
  const SamplerState state{number("seed"), number("draws")};
  if (state.draws <= kMostDraws) return state;
  throw std::runtime_error(path.string() + ": \"sampler\" has \"draws\" " +
                           std::to_string(state.draws) + ", allowed: up to 2^32");
}

}  // namespace

KeyholeCache::Contents contents_of(const SavedSession& session) {
  return {"weights " + session.identity.weights + ", vocabulary " + session.identity.vocabulary,
          {session.tokens.begin(), session.tokens.begin() + session.taken}};
}

void check_session_path(const fs::path& path) {
  // The file and the one beside it are new files of the folder.
  const NewFile probe(replaceable_path(path), NewFile::Access::owner);
}

void save_session(const fs::path& named, KeyholeCache& cache, const SavedSession& session) {
  const ForOwnerAlone guard;
  const fs::path path = replaceable_path(named);
  const fs::path kv = next_kv_of(path);
  std::error_code ignored;
  // A file that lies there keeps its mode, whatever the guard says.
  for (const fs::path& old : {fs::path(path.string() + ".tmp"), fs::path(kv.string() + ".tmp")}) {
    fs::remove(old, ignored);
  }
  const KeyholeCache::Contents contents = contents_of(session);
  cache.save(kv.string(), &contents);
  if (!cache.writes()) return;
  json root = {{"keyhole_session", kVersion},
               {"keyhole", keyhole_version()},
               {"model", session.model},
               {"weights", session.identity.weights},
               {"vocabulary", session.identity.vocabulary},
               {"kv_dtype", session.kv_dtype},
               {"kv", kv_name_of(path, kv)},
               {"kv_bytes", fs::file_size(kv)},
               {"kv_end", end_of(kv)},
               {"taken", session.taken},
               {"tokens", session.tokens}};
  if (session.rope_tokens) root["rope_tokens"] = *session.rope_tokens;
  if (session.sampler.draws != 0) {
    root["sampler"] = {{"seed", session.sampler.seed}, {"draws", session.sampler.draws}};
  }
  // The model's name is a folder's, which may be no UTF-8: it is for people.
  const std::string text = root.dump(-1, ' ', false, json::error_handler_t::replace);
  replace_file(path, [&text](std::ostream& out) { out << text << "\n"; });
  for (const char* number : {".kv0", ".kv1"}) {
    const fs::path file = path.string() + number;
    if (file != kv) remove_kv(file);
  }
}

SavedSession read_session(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(path.string() + ": cannot be opened");
  const json root = json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (!root.is_object() || !root.contains("keyhole_session")) {
    throw std::runtime_error(path.string() +
                             ": no saved session; allowed: what --save-session wrote");
  }
  if (const int version = take<int>(root, "keyhole_session", path); version != kVersion) {
    throw std::runtime_error(path.string() + ": a saved session of format " +
                             std::to_string(version) + ", allowed: " + std::to_string(kVersion));
  }
  SavedSession session;
  session.model = take<std::string>(root, "model", path);
  session.identity.weights = take<std::string>(root, "weights", path);
  session.identity.vocabulary = take<std::string>(root, "vocabulary", path);
  session.kv_dtype = take<std::string>(root, "kv_dtype", path);
  if (session.kv_dtype != "f16" && session.kv_dtype != "bf16" && session.kv_dtype != "f32") {
    throw std::runtime_error(path.string() + ": \"kv_dtype\" is \"" + session.kv_dtype +
                             "\", allowed: f16, bf16, f32");
  }
  session.taken = take<uint32_t>(root, "taken", path);
  session.tokens = take_tokens(root, path);
  if (session.taken > session.tokens.size() || session.tokens.empty()) {
    throw std::runtime_error(path.string() + ": " + std::to_string(session.taken) + " of " +
                             std::to_string(session.tokens.size()) + " tokens were taken");
  }
  if (root.contains("rope_tokens")) {
    session.rope_tokens = whole_number(root["rope_tokens"], "\"rope_tokens\"", path);
  }
  if (root.contains("sampler")) session.sampler = take_sampler(root["sampler"], path);
  const auto name = take<std::string>(root, "kv", path);
  // A plain file name: a session must not lead out of its folder.
  if (name.empty() || name.find('/') != std::string::npos) {
    throw std::runtime_error(path.string() + ": \"kv\" is \"" + name +
                             "\", allowed: the name of a file in the same folder");
  }
  std::error_code error;
  const fs::path real = path_behind_links(path);
  const bool is_end = name == ".kv0" || name == ".kv1";
  session.kv = is_end ? fs::path(real.string() + name) : real.parent_path() / name;
  const uint64_t bytes = fs::file_size(session.kv, error);
  if (error) {
    throw std::runtime_error(session.kv.string() + ": cannot be read: " + error.message() +
                             "; it holds the K and V of " + path.string());
  }
  if (bytes != take<uint64_t>(root, "kv_bytes", path) ||
      end_of(session.kv) != take<std::string>(root, "kv_end", path)) {
    throw std::runtime_error(session.kv.string() + ": not the file that was saved with " +
                             path.string());
  }
  return session;
}

void check_session(const SavedSession& session, const fs::path& path, const std::string& model,
                   const ModelIdentity& identity, uint32_t vocab_size) {
  const auto refuse = [&](const std::string& what) {
    throw std::runtime_error(path.string() + ": was saved with " + what);
  };
  if (session.identity.weights != identity.weights) {
    refuse("the model " + session.model + " (weights " + session.identity.weights + "), this is " +
           model + " (weights " + identity.weights + ")");
  }
  if (session.identity.vocabulary != identity.vocabulary) {
    refuse("another vocabulary (tokenizer.json " + session.identity.vocabulary + "), this is " +
           identity.vocabulary);
  }
  for (const uint32_t token : session.tokens) {
    if (token < vocab_size) continue;
    refuse("the token " + std::to_string(token) + ", this model has " + std::to_string(vocab_size));
  }
}

}  // namespace keyhole::tools
