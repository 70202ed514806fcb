// A cache of llama.cpp on a card. Up to a length it is what it is without Keyhole: K and V lie in the card's memory,
// and llama.cpp attends. A sequence that is to decode behind more tokens takes the whole cache to Keyhole's sessions,
// and the card's memory is given back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tools/engines/llama.cpp/cells.h"
#include "tools/engines/llama.cpp/cuda/card_memory.h"
#include "tools/engines/llama.cpp/cuda/card_rows.h"
#include "tools/engines/llama.cpp/cuda/card_stream.h"
#include "tools/engines/llama.cpp/cuda/follower.h"
#include "tools/engines/llama.cpp/cuda/half_queries.h"
#include "tools/engines/llama.cpp/cuda/lazy_session.h"
#include "tools/engines/llama.cpp/joint.h"
#include "tools/engines/llama.cpp/nodes.h"
#include "tools/engines/llama.cpp/read_back.h"
#include "tools/engines/llama.cpp/restored_rows.h"
#include "tools/engines/llama.cpp/rewriting.h"
#include "tools/engines/llama.cpp/sequences.h"
#include "tools/engines/llama.cpp/settings.h"
#include "tools/engines/llama.cpp/store.h"

struct ggml_tensor;

namespace keyhole::llama_cpp {

/// Who attends with a batch over a layer, and over what.
enum class Way {
  /// llama.cpp, over its cells on the card.
  kCard,
  /// Keyhole, as prompts attend, over llama.cpp's cells on the card.
  kPrompt,
  /// Keyhole, over its sessions.
  kSession,
};

/// A batch that may be one CUDA graph: whose tokens it has, and how many of each.
struct GraphStep {
  std::vector<LazySession*> sessions;
  std::vector<uint32_t> tokens;
};

/// Before a graph is computed, its nodes that have to do with the cache are met, in their order; then way() tells what
/// becomes of them. Errors are std::runtime_error, whose text does not name the node. Used by one thread at a time.
class CardCache {
 public:
  /// `memory` and the streams outlive the cache. `sessions`: the one of Keyhole's sessions; `prompts`: of attention
  /// with prompts.
  CardCache(const Settings& settings, CardMemory& memory, CardStream& sessions,
            CardStream& prompts);
  ~CardCache();
  CardCache(const CardCache&) = delete;
  CardCache& operator=(const CardCache&) = delete;

  /// A tensor of the cache, when its place in the buffer is known.
  void add(const ggml_tensor* tensor, const CacheName& name);
  /// A FLASH_ATTN_EXT of a graph: remembers the layer's shape, as an engine wants all of them.
  void announce(const ggml_tensor* attention, const CacheName& name);

  /// A graph of this backend begins, the `graph`th, whose ggml_cgraph::uid is `uid`. threads: with which llama.cpp
  /// computes on the host now; 0: not known.
  void begin(ggml_backend_t cuda, uint64_t graph, uint64_t uid, int threads) {
    cuda_ = cuda;
    graph_ = graph;
    uid_ = uid;
    if (rewriter_) rewriter_->set_threads(threads);
  }
  /// A SET_ROWS into the cache.
  void meet_write(const ggml_tensor* node, const CacheName& name);
  /// A FLASH_ATTN_EXT over the cache.
  void meet_attention(const ggml_tensor* node, const CacheName& name);
  /// Another node that reads the cells; `touched` is the tensor of the cache, or the view of it, that is read.
  void meet_read(const ggml_tensor* touched, const CacheName& name);
  /// One that changes them: it shifts positions. False: the layer's tokens are in sessions, which are changed when a
  /// batch goes on with them, so that there is nothing to compute.
  [[nodiscard]] bool meet_change(const ggml_tensor* node, const ggml_tensor* touched,
                                 const CacheName& name);
  /// What becomes of a FLASH_ATTN_EXT that was met.
  [[nodiscard]] Way way(const CacheName& name) const;
  /// Whether a SET_ROWS that was met is llama.cpp's to compute.
  [[nodiscard]] bool is_written(const CacheName& name) const;
  /// Attends; `way` is kPrompt or kSession. Enqueued behind what the backend has enqueued, and before what it will.
  void attend(const ggml_tensor* node, const CacheName& name);
  /// The graph was not computed to its end.
  void failed();

  /// The batch under way, where it is a few tokens of one sequence, or of each of several that attend together, with
  /// which Keyhole attends in all of `layers` layers, which are all that it takes, and where the settings want graphs;
  /// else an empty one.
  [[nodiscard]] GraphStep graph_step(size_t layers) const;
  /// A graph of such a step is about to be launched: true, and all its sessions know; or false, as one of them has
  /// changed since its capture.
  [[nodiscard]] bool announce(const GraphStep& step, uint64_t graph);
  /// It was launched.
  void launched(const GraphStep& step);
  /// attend() while a graph is captured on stream().
  void capture(const ggml_tensor* node, const CacheName& name);
  [[nodiscard]] CardStream& stream() { return stream_; }

  /// Bytes of a tensor are to be read, or written, from outside. False, and NULL: on the card. Else they are in `out`
  /// then, out of sessions, and are to be written to the host's memory that is returned. Throws where they are nowhere.
  [[nodiscard]] bool read(const CacheName& name, size_t offset, size_t bytes, std::byte* out);
  [[nodiscard]] std::byte* open_to_write(const CacheName& name, size_t offset, size_t bytes);
  /// A stream's cells of one tensor are copied to another; call it for each tensor. Returns how many of the first cells
  /// have to be copied.
  [[nodiscard]] uint32_t copied(const CacheName& name, uint32_t from, uint32_t to);
  /// All cells are empty.
  void cleared();

 private:
  struct Layer {
    CardRows rows;
    std::optional<LayerShape> shape;
    std::string left;     // why Keyhole leaves it to llama.cpp
    uint32_t number = 0;  // in the engine
    const ggml_tensor* fresh[2] = {nullptr,
                                   nullptr};  // new K and V on the card, of batch `written`
    uint64_t written[2] = {0, 0};             // the last batch that brought new K, and V
    uint64_t met = 0;                         // the last batch whose attention was met
    uint64_t aside = 0;                       // the last batch that llama.cpp attends here
    uint64_t known = 0;                       // uid of a graph whose node is as it should be
  };

  [[nodiscard]] bool on_card() const { return on_card_ || copy_; }
  [[nodiscard]] bool takeable() const;
  void stay(const std::string& why);
  [[nodiscard]] std::string why_to_leave(const ggml_tensor* node, Layer& layer);
  void begin_batch(const ggml_tensor* ids);
  void hold_batch();
  void hold(const ggml_tensor* touched, const CacheName& name);
  [[nodiscard]] static CellRows rows_of(const Layer& layer, bool values);
  [[nodiscard]] std::span<const int32_t> note_shifts(const ggml_tensor* node);
  void plan(const ggml_tensor* node);
  void choose_way();
  void check_not_gone();
  void follow_on_card(bool ends);
  void end_following();
  [[nodiscard]] bool in_order(const Part& part) const;
  void open();
  void hand_over(std::span<const int64_t> coming);
  void keep_loose(std::span<const int64_t> coming);
  void forget_taken();
  void read_out(uint32_t stream, uint32_t first, uint32_t count);
  void let_go();
  [[nodiscard]] bool bring_restored();
  void come_back();
  void make_room();
  [[nodiscard]] bool hold_keys();
  [[noreturn]] static void no_memory();
  void build(Sequence& sequence, uint32_t tokens);
  [[nodiscard]] static std::vector<uint32_t> cells_of(const Sequence& sequence, uint32_t tokens);
  void catch_up(Sequence& sequence, uint32_t tokens);
  void catch_up(Session& session, uint32_t stream, std::span<const uint32_t> cells);
  void attend_session(const ggml_tensor* node, Layer& layer, bool captured);
  [[nodiscard]] uint32_t most_joint() const;
  void attend_together(const Layer& layer, const Joint& joint, const JointRows& rows,
                       bool captured);
  void attend_prompt(const ggml_tensor* node, Layer& layer);

  Settings settings_;
  bool copy_;
  CardMemory& memory_;
  CardStream& stream_;
  CardStream& prompts_;
  ggml_backend_t cuda_ = nullptr;
  HalfQueries half_;
  std::map<int, Layer> layers_;
  std::unique_ptr<Cells> cells_;
  std::unique_ptr<Store> store_;
  std::unique_ptr<SessionRewriter> rewriter_;  // there with `store_`
  LazySessions lazy_;
  std::unique_ptr<Sequences> sequences_;
  bool on_card_ = true;     // else the tokens are in sessions
  bool too_large_ = false;  // the card has no memory for the cells of the batch under way
  bool renewed_ = false;    // all cells have new numbers, and nothing has happened since
  uint64_t shifted_ = 0;    // the last graph whose shifts are noted
  uint64_t changed_ = 0;    // the last graph that changes keys
  std::string stays_;       // why llama.cpp attends, whatever comes
  /// While tokens are in sessions, those that are in none: what cells were filled with from outside, and what lay in
  /// them when the others went to sessions.
  RestoredRows restored_;
  /// Cells of writes up to this number hold nothing: their tokens were in sessions alone when the cache came back to
  /// the card. 0: there are none.
  uint64_t gone_ = 0;

  // The batch under way: its number, its cells, whose tokens they are, and who attends.
  uint64_t batch_ = 0;
  uint64_t before_batch_ = 0;  // the latest write before its own
  uint64_t graph_ = 0;         // the one that is met
  uint64_t uid_ = 0;           // its ggml_cgraph::uid
  uint64_t batch_graph_ = 0;   // the one in which the batch began
  bool abandoned_ = true;      // the next write begins a batch, whatever layer it is of
  std::vector<int64_t> ids_;
  const ggml_tensor* mask_ = nullptr;
  BatchKind kind_ = BatchKind::kOther;
  std::vector<std::vector<Part>> parts_;
  Way way_ = Way::kCard;
  uint64_t joined_ = 0;        // batches in which several sequences attended together
  uint64_t joined_batch_ = 0;  // the last of them
  uint64_t joined_graphs_ =
      0;  // batches of several sequences that were one CUDA graph; they are not among `joined_`

  /// Brings tokens of batches before to sessions.
  Follower follower_;
};

}  // namespace keyhole::llama_cpp
