#include "runtime/parallel/spread_file.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <system_error>

#include "runtime/files/new_file.h"
#include "runtime/files/write_target.h"
#include "runtime/save/byte_source.h"
#include "runtime/session/session_file.h"

namespace keyhole::runtime {
namespace {

constexpr char kMagic[8] = {'K', 'E', 'Y', 'H', 'O', 'L', 'E', '\x1e'};
constexpr uint32_t kVersion = 1;
constexpr uint32_t kMostRanks = 65536;

/// What stands at PATH.
struct Names {
  uint64_t id = 0;
  TextBlocks blocks;
  std::vector<uint32_t> tokens;

  [[nodiscard]] std::string share(const std::string& path, uint32_t rank) const {
    char hex[17];
    std::snprintf(hex, sizeof hex, "%016llx", static_cast<unsigned long long>(id));
    return path + "." + hex + "." + std::to_string(rank) + "-of-" + std::to_string(blocks.ranks);
  }
};

void write_names(const Names& names, const std::string& path) {
  try {
    NewFile file(path, NewFile::Access::owner);
    ChecksumWriter out(file.stream());
    out.bytes(reinterpret_cast<const std::byte*>(kMagic), sizeof kMagic);
    out.value(kVersion);
    out.value(names.id);
    out.value(names.blocks.ranks);
    out.value(names.blocks.block);
    out.value(static_cast<uint32_t>(names.tokens.size()));
    for (const uint32_t n : names.tokens) out.value(n);
    out.finish();
    file.commit();
  } catch (const std::system_error& e) {
    throw Error(Status::io, e.what());
  }
}

Names read_names(const std::string& path) {
  const auto corrupt = [&](const std::string& text) {
    throw Error(Status::corrupt, path + ": " + text);
  };
  const FileSource source(path);
  Names names;
  try {
    ChecksumReader in(source);
    char magic[sizeof kMagic];
    in.bytes(reinterpret_cast<std::byte*>(magic), sizeof magic, "magic");
    const auto version = in.value<uint32_t>("format version");
    if (version != kVersion) {
      throw Error(Status::version, "format version " + std::to_string(version) +
                                       " of a session of several ranks, this library reads " +
                                       std::to_string(kVersion));
    }
    names.id = in.value<uint64_t>("id");
    names.blocks.ranks = in.value<uint32_t>("ranks");
    names.blocks.block = in.value<uint32_t>("block");
    const auto layers = in.value<uint32_t>("layers");
    names.tokens = in.array<uint32_t>(layers, "tokens");
    in.finish();
  } catch (const Error& e) {
    throw e.status() == Status::io ? e : Error(e.status(), path + ": " + e.what());
  }
  if (names.blocks.ranks == 0 || names.blocks.ranks > kMostRanks) {
    corrupt("a session of " + std::to_string(names.blocks.ranks) + " ranks");
  }
  if (names.blocks.block == 0) corrupt("blocks of 0 tokens");
  return names;
}

/// The old files of a save that another has replaced; what cannot be read or removed is left.
void remove_shares(const std::string& path, const std::optional<Names>& names, uint32_t rank,
                   uint32_t ranks) noexcept {
  if (!names) return;
  for (uint32_t r = rank; r < names->blocks.ranks; r += ranks) {
    std::error_code none;
    std::filesystem::remove(names->share(path, r), none);
  }
}

std::optional<Names> names_at(const std::string& path) noexcept {
  try {
    if (std::filesystem::exists(path) && is_spread_file(path)) return read_names(path);
  } catch (...) {  // NOLINT: what stands there is not looked at further
  }
  return std::nullopt;
}

/// Where what `path` leads to can be replaced and have the ranks' files beside it.
std::string path_to_replace(const std::string& path) {
  try {
    return replaceable_path(path).string();
  } catch (const std::system_error& e) {
    throw Error(Status::io, e.what());
  }
}

uint64_t new_id() {
  std::random_device device;
  return uint64_t{device()} << 32 | device();
}

// ---- Load ----------------------------------------------------------------------------------------

/// Rows of this rank's tokens of a layer, in the order of the text.
struct Rows {
  std::vector<std::byte> k, v;
};

/// Tokens of the text in [0, tokens) that are of `rank` in `blocks`, as runs [begin, end).
template <class F>
void each_run(const TextBlocks& blocks, uint32_t rank, uint32_t tokens, const F& f) {
  for (uint64_t begin = uint64_t{rank} * blocks.block; begin < tokens;
       begin += uint64_t{blocks.block} * blocks.ranks) {
    f(static_cast<uint32_t>(begin),
      static_cast<uint32_t>(std::min<uint64_t>(tokens, begin + blocks.block)));
  }
}

/// Copies what `from`, which holds the share `old`, has of the tokens that are `mine`.
void take_rows(const Session& from, const LayerShares& old, const LayerShares& mine, uint32_t layer,
               uint32_t tokens, Rows& to) {
  std::vector<uint32_t> theirs, places;  // where they lie in `from`, and in `to`
  each_run(old.blocks(), old.rank(), tokens, [&](uint32_t begin, uint32_t end) {
    for (uint32_t t = begin; t < end; ++t) {
      if (!mine.is_own(t)) continue;
      theirs.push_back(old.of(layer, t));
      places.push_back(mine.of(layer, t));
    }
  });
  if (theirs.empty()) return;
  const ModelShape& model = from.engine().model();
  const size_t bytes = model.of(layer).token_bytes(model.kv_dtype);
  std::vector<std::byte> k(theirs.size() * bytes), v(k.size());
  from.sequence().read(layer, theirs, k.data(), v.data());
  for (size_t i = 0; i < places.size(); ++i) {
    std::copy_n(k.data() + i * bytes, bytes, to.k.data() + places[i] * bytes);
    std::copy_n(v.data() + i * bytes, bytes, to.v.data() + places[i] * bytes);
  }
}

/// A session with the settings, sliding layers and identity of the file of rank 0, and this rank's share of all other
/// tokens, none of which is indexed.
std::unique_ptr<Session> load_redivided(const std::shared_ptr<const Engine>& engine,
                                        const std::string& path, const Names& names, bool is_whole,
                                        const ExpectedIdentity& expected) {
  const ModelShape& model = engine->model();
  const LayerShares mine(*engine);
  std::vector<Rows> rows(model.layers);
  std::vector<uint32_t> left(model.layers, 0);  // what is not divided anew
  for (uint32_t layer = 0; layer < model.layers; ++layer) {
    if (mine.is_whole(layer)) {
      left[layer] = names.tokens[layer];
      continue;
    }
    const size_t bytes = model.of(layer).token_bytes(model.kv_dtype);
    rows[layer].k.resize(mine.of(layer, names.tokens[layer]) * bytes);
    rows[layer].v.resize(rows[layer].k.size());
  }
  std::unique_ptr<Session> own;
  // The last is that of rank 0, which stays.
  for (uint32_t r = names.blocks.ranks; r-- > 0;) {
    own.reset();
    const LayerShares old(*engine, names.blocks, r);
    const std::string file = is_whole ? path : names.share(path, r);
    own = load_session(engine, file, expected);
    for (uint32_t layer = 0; layer < model.layers; ++layer) {
      const uint32_t held = own->tokens(layer), needed = old.of(layer, names.tokens[layer]);
      if (held != needed) {
        throw Error(Status::corrupt, file + ": layer " + std::to_string(layer) + " holds " +
                                         std::to_string(held) +
                                         " tokens, needed: " + std::to_string(needed) +
                                         ", the share of rank " + std::to_string(r));
      }
      if (old.is_whole(layer)) continue;
      take_rows(*own, old, mine, layer, names.tokens[layer], rows[layer]);
    }
  }
  own->truncate_layers(left);
  for (uint32_t layer = 0; layer < model.layers; ++layer) {
    const uint32_t n = mine.is_whole(layer) ? 0 : mine.of(layer, names.tokens[layer]);
    if (n == 0) continue;
    const LayerShape m = model.of(layer);
    const auto view = [&](const std::vector<std::byte>& of) {
      return dense_tensor(of.data(), n, m.kv_heads, m.head_dim, model.kv_dtype);
    };
    TensorView v = view(rows[layer].v);
    v.dim = m.value_dim;  // zeros lie behind them
    own->prefill(layer, view(rows[layer].k), v, nullptr);
    rows[layer] = {};
  }
  return own;
}

LoadedShare load_share(const std::shared_ptr<const Engine>& engine, const std::string& given,
                       ExpectedIdentity expected) {
  const std::string path = path_behind_links(given).string();
  const TextBlocks& mine = engine->text_blocks();
  const uint32_t rank = engine->communicator() == nullptr ? 0 : engine->communicator()->rank();
  Names names;
  const bool is_whole = !is_spread_file(path);
  LoadedShare loaded;
  if (is_whole) {
    // An ordinary session: the whole text is of one rank.
    loaded.own = load_session(engine, path, expected);
    names.blocks = {UINT32_MAX, 1};
    for (uint32_t l = 0; l < engine->model().layers; ++l) {
      names.tokens.push_back(loaded.own->tokens(l));
    }
    loaded.tokens = names.tokens;
    if (mine.ranks == 1) return loaded;
    loaded.own.reset();
  } else {
    names = read_names(path);
    if (names.tokens.size() != engine->model().layers) {
      throw Error(Status::invalid_argument,
                  path + ": a session of " + std::to_string(names.tokens.size()) +
                      " layers, the engine has " + std::to_string(engine->model().layers));
    }
    loaded.tokens = names.tokens;
    expected.held_by_all = *std::max_element(names.tokens.begin(), names.tokens.end());
  }
  const bool is_same =
      names.blocks.ranks == mine.ranks && (mine.ranks == 1 || names.blocks.block == mine.block);
  if (!is_same) {
    loaded.own = load_redivided(engine, path, names, is_whole, expected);
    return loaded;
  }
  const std::string file = names.share(path, rank);
  loaded.own = load_session(engine, file, expected);
  const std::vector<uint32_t> shares = LayerShares(*engine).of(names.tokens);
  for (uint32_t l = 0; l < shares.size(); ++l) {
    if (loaded.own->tokens(l) == shares[l]) continue;
    throw Error(Status::corrupt, file + ": layer " + std::to_string(l) + " holds " +
                                     std::to_string(loaded.own->tokens(l)) +
                                     " tokens, needed: " + std::to_string(shares[l]));
  }
  return loaded;
}

}  // namespace

bool is_spread_file(const std::string& path) {
  const FileSource source(path);
  std::byte magic[sizeof kMagic];
  if (source.size() < sizeof magic) return false;
  source.read(0, magic, sizeof magic);
  return std::equal(std::begin(magic), std::end(magic), reinterpret_cast<const std::byte*>(kMagic));
}

void save_spread(const Session& own, const SpreadSession& spread, const std::string& given) {
  Communicator& ranks = spread.ranks();
  Names names{new_id(), own.engine().text_blocks(), spread.all_tokens()};
  ranks.broadcast(std::as_writable_bytes(std::span(&names.id, 1)), 0);
  std::string path, mine;
  const auto remove_mine = [&] {
    std::error_code none;
    if (!mine.empty()) std::filesystem::remove(mine, none);
  };
  try {
    ranks.together({"save", 0, Wait::work}, [&] {
      spread.check_failure();
      path = path_to_replace(given);
      mine = names.share(path, ranks.rank());
      save_session(own, mine);
    });
  } catch (...) {
    remove_mine();  // nothing names it
    throw;
  }
  const std::optional<Names> old = names_at(path);
  // Nobody reads what stands there any more before rank 0 replaces it.
  ranks.agree({"save", 1, Wait::work});
  bool has_replaced = false;
  try {
    ranks.together({"save", 2, Wait::work}, [&] {
      if (ranks.rank() != 0) return;
      write_names(names, path);
      has_replaced = true;
    });
  } catch (...) {
    // Where ranks are lost, rank 0 may have replaced the file already: then it names this one.
    if (!ranks.is_lost() || (ranks.rank() == 0 && !has_replaced)) remove_mine();
    throw;
  }
  remove_shares(path, old, ranks.rank(), ranks.size());
}

LoadedShare load_spread(const std::shared_ptr<const Engine>& engine, const std::string& path,
                        const ExpectedIdentity& expected) {
  if (engine->communicator() == nullptr) return load_share(engine, path, expected);
  LoadedShare loaded;
  loaded.own = SpreadSession::make_own(*engine->communicator(), [&] {
    loaded = load_share(engine, path, expected);
    return std::move(loaded.own);
  });
  return loaded;
}

}  // namespace keyhole::runtime
