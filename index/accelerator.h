// A device that may take over the large, regular parts of builds: exact neighbours and k-means. index/ knows only
// this interface; the runtime implements it over a GPU.
//
// The caller can do by itself all that an accelerator takes over: an accelerator declines by returning false (the
// task is too small, there is no memory, the device has failed), and the build goes on as if there were none. Its
// results may differ from the host's in the last bits of scores, so an index built with one need not equal, bit for
// bit, that of a machine without; each alone is deterministic.
#pragma once

#include "cpu/tensor_view.h"
#include "cpu/types.h"
#include "index/partitions/kmeans.h"

namespace keyhole::index {

/// The task of finding, for each query, the keys of largest  query . key + query_extra * key_extra.
struct NearestTask {
  RowsView keys;
  const float* key_extra = nullptr;  ///< `[keys.tokens]`; null, as query_extra is then: none
  RowsView queries;
  const float* query_extra = nullptr;  ///< `[queries.tokens]`
  const uint32_t* limits = nullptr;    ///< query i sees keys [0, limits[i]); null: all
  uint32_t most = 0;                   ///< keys per query
  /// If not 0, the queries are the keys themselves and each list gets at most this many rows, best first, as graph
  /// edges of key i: those of its `most` nearest that no nearer one occludes by being nearer to it than key i is. An
  /// accelerator that does not compare keys with each other gives the nearest, from which the caller chooses.
  uint32_t thin = 0;
};

struct NearestLists {
  uint32_t* rows = nullptr;    ///< `[queries, thin != 0 ? thin : most]` best first
  uint32_t* counts = nullptr;  ///< `[queries]`
};

/// The task of cluster_points() in index/partitions/kmeans.h.
struct KMeansTask {
  const float* points = nullptr;  ///< `[n, dim]`
  size_t n = 0;
  uint32_t dim = 0;
  KMeansConfig config;
};

struct KMeansResult {
  float* centroids = nullptr;  ///< `[clusters, dim]`
  uint32_t* labels = nullptr;  ///< `[n]` the nearest centroid of every point; null: not wanted
};

/// A device that helps builds. May be called from several threads at once; a call may wait for others. Never throws.
class Accelerator {
 public:
  virtual ~Accelerator() = default;
  /// Searches exactly. False: declined, and nothing that counts was written.
  [[nodiscard]] virtual bool nearest_keys(const NearestTask& task, const NearestLists& lists) = 0;
  [[nodiscard]] virtual bool kmeans(const KMeansTask& task, const KMeansResult& result) = 0;
  /// Gives back memory that no call is using; called at the end of a build.
  virtual void release() = 0;
};

}  // namespace keyhole::index
