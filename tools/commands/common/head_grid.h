// Heat maps of a result's figures of every (layer, KV head), or of every (layer, query head).
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "runtime/files/json.h"
#include "tools/page/heat_map.h"

namespace keyhole::tools {

/// The cells of all heads that an array of rows names, in growing order of layers and of heads.
class HeadGrid {
 public:
  /// `head`: the field beside "layer" that names a head, "kv_head" or "q_head".
  explicit HeadGrid(const nlohmann::ordered_json& rows, std::string head = "kv_head");

  [[nodiscard]] size_t cells() const { return layers_.size() * heads_.size(); }
  [[nodiscard]] size_t cell(const nlohmann::ordered_json& row) const;

  /// A map without values: all cells are unknown.
  [[nodiscard]] HeatMap map(std::string title, std::string field, Scale scale,
                            double limit = 0) const;
  /// A map of the field's figure in each row.
  [[nodiscard]] HeatMap map_of(const nlohmann::ordered_json& rows, std::string title,
                               std::string field, Scale scale, double limit = 0) const;
  /// A map coloured by name(row) of each row.
  template <class Name>
  [[nodiscard]] HeatMap names_of(const nlohmann::ordered_json& rows, std::string title,
                                 std::string field, const Name& name) const {
    HeatMap out = map(std::move(title), std::move(field), Scale::linear);
    for (const auto& row : rows) out.set_name(cell(row), name(row));
    return out;
  }

 private:
  std::string head_;
  std::map<uint32_t, size_t> layers_, heads_;
};

}  // namespace keyhole::tools
