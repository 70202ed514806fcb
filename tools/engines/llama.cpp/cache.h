// One cache of llama.cpp, i.e. the K and V of a context: what lies in its cells, and Keyhole's sessions over it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "tools/engines/llama.cpp/cells.h"
#include "tools/engines/llama.cpp/cpu_backend.h"
#include "tools/engines/llama.cpp/joint.h"
#include "tools/engines/llama.cpp/nodes.h"
#include "tools/engines/llama.cpp/read_back.h"
#include "tools/engines/llama.cpp/restored_rows.h"
#include "tools/engines/llama.cpp/rewriting.h"
#include "tools/engines/llama.cpp/sequences.h"
#include "tools/engines/llama.cpp/session.h"
#include "tools/engines/llama.cpp/settings.h"
#include "tools/engines/llama.cpp/store.h"

struct ggml_tensor;

namespace keyhole::llama_cpp {

/// A batch goes through the layers one after the other. In each, write() takes the new K and the new V, and attend()
/// attends with them. What else happens to the cache comes by the other functions. Errors are std::runtime_error, whose
/// text does not name the node; sessions that may have failed halfway are gone then. Used by one thread at a time.
class Cache {
 public:
  explicit Cache(const Settings& settings);
  ~Cache();
  Cache(const Cache&) = delete;
  Cache& operator=(const Cache&) = delete;

  /// A tensor of the cache, when its place in the buffer is known.
  void add(const ggml_tensor* tensor, const CacheName& name);
  /// A FLASH_ATTN_EXT of a graph that will be computed, maybe: remembers the layer's shape, as an engine wants all of
  /// them.
  void announce(const ggml_tensor* attention, const CacheName& name);
  /// How many threads llama.cpp computes with now, and the most that it has ever said, which the engine has when it is
  /// made.
  void set_threads(int now, int most);

  /// A SET_ROWS of new K or V, and the cells that they go to. False: it is llama.cpp's to compute as well.
  [[nodiscard]] bool write(const ggml_tensor* node, const CacheName& name);
  /// A FLASH_ATTN_EXT over a layer. False: llama.cpp has to compute it, over its own cache, which has all that it
  /// needs.
  [[nodiscard]] bool attend(const ggml_tensor* node, const CacheName& name);

  /// The cells that lie at these bytes of a tensor were filled from outside (a saved state).
  void restored(const CacheName& name, size_t offset, size_t bytes);
  /// The same where the cells of these bytes have no memory: where the caller has to write them. NULL: in the tensor
  /// alone.
  [[nodiscard]] std::byte* room_for_restored(const ggml_tensor* tensor, const CacheName& name,
                                             size_t offset, size_t bytes);
  /// Bytes of a tensor out of sessions. Throws where they are in none.
  void read(const ggml_tensor* tensor, const CacheName& name, size_t offset, size_t bytes,
            std::byte* out);
  /// All cells of a stream are copied to another one; call it for each tensor, before or after the bytes are copied.
  void copied(const CacheName& name, uint32_t from, uint32_t to);
  /// All cells are empty.
  void cleared();
  /// llama.cpp changes the cells' contents by itself (it shifts positions): sessions do not hold what they hold.
  void changed_by_others();
  /// A ROPE that shifts the positions of some cells. Where these are filled `cpu` computes it; sessions are changed
  /// when a batch goes on with them.
  void shifted(ggml_tensor* node, CpuBackend& cpu);
  /// llama.cpp reads the cells by itself (without flash attention).
  void read_by_others(const ggml_tensor* node);

  /// Whether K and V lie in llama.cpp's cache, too, so that they can be read there.
  [[nodiscard]] bool complete() const { return copy_ || !taken_; }
  /// The same of one layer: llama.cpp's cache has in any case those that Keyhole leaves to it, and what may be lent to
  /// other layers.
  [[nodiscard]] bool holds(const CacheName& name) const {
    const Layer& layer = layers_.at(name.layer);
    return complete() || !layer.left.empty() || layer.lent;
  }
  /// Whether Keyhole has attended: then K and V lie in the cache token by token. (Without flash attention values lie
  /// component by component.)
  [[nodiscard]] bool taken() const { return taken_; }
  [[nodiscard]] const Cells* cells() const { return cells_.get(); }

 private:
  struct Layer {
    const ggml_tensor* tensors[2] = {nullptr, nullptr};  // keys, values
    std::optional<LayerShape> shape;  // of its attention, once that was announced
    std::string left;                 // why Keyhole leaves it to llama.cpp
    bool lent = false;                // layers without cells of their own may attend to its
    uint32_t number = 0;              // in the engine
    uint64_t written[2] = {0, 0};     // the last batch that brought new K, and V
    uint64_t attended = 0;            // the last batch that Keyhole attended
  };
  /// New K or V of one layer, in the cache's dtype: they are attended before the next layer's come.
  struct NewRows {
    std::vector<std::byte> rows;
    const Layer* layer = nullptr;
  };

  void open();
  [[nodiscard]] const Cache* beside(bool before) const;
  void look_beside();
  /// One line of the log about the engine.
  void tell(const StoreShape& shape) const;
  [[nodiscard]] static CellRows rows_of(const Layer& layer, bool values);
  void begin_batch(std::vector<int64_t> ids);
  void forget_taken();
  void read_out(uint32_t stream, uint32_t first, uint32_t count);
  [[nodiscard]] bool plan(const ggml_tensor* node);
  void build(const std::vector<Part>& parts);
  void attend_parts(const ggml_tensor* node, Layer& layer);
  void attend_part(const Part& part, size_t stream, const ggml_tensor* node, Layer& layer);
  void attend_together(const Joint& joint, const ggml_tensor* node, Layer& layer);
  [[nodiscard]] Rows new_rows(const Layer& layer, bool values, size_t row, uint32_t count) const;
  void catch_up(const Part& part, Layer& layer);
  [[nodiscard]] Rows cached(const Layer& layer, bool values, uint32_t stream, uint32_t cell,
                            uint32_t count) const;
  void close_to_others(const Layer& layer) const;
  [[nodiscard]] bool leave(const std::string& why);

  Settings settings_;
  bool copy_;
  std::thread::id made_by_ = std::this_thread::get_id();
  uint32_t threads_ = 0;
  ParallelFor parallel_;
  std::map<int, Layer> layers_;
  std::unique_ptr<Cells> cells_;
  std::unique_ptr<Sequences> sequences_;
  std::unique_ptr<Store> store_;
  std::unique_ptr<SessionRewriter> rewriter_;  // there with `store_`
  RestoredRows restored_;                      // where there is no copy
  bool opened_ = false;                        // the engine was made, unless no layer is for it
  bool told_ = false;                          // that llama.cpp attends itself
  std::set<std::string>
      reasons_;           // for which it was told that llama.cpp attends some batches itself
  bool taken_ = false;    // Keyhole has attended a layer
  bool sliding_ = false;  // its layers have a sliding window: llama.cpp attends
  bool renewed_ = false;  // all cells have new numbers, and nothing has happened since
  std::set<int> turned_;  // layers that the shift under way has turned
  std::string broken_;    // why the cache can no longer be attended

  // The batch under way: its number, its cells, stream after stream, and once its mask has been read, whose tokens they
  // are.
  uint64_t batch_ = 0;
  std::vector<int64_t> ids_;
  const ggml_tensor* mask_ = nullptr;
  BatchKind kind_ = BatchKind::kOther;
  std::vector<std::vector<Part>> parts_;  // of each stream
  uint64_t joined_ = 0;                   // batches in which several sequences attended together
  uint64_t joined_batch_ = 0;             // the last of them
  NewRows new_rows_[2];                   // keys, values
};

}  // namespace keyhole::llama_cpp
