// One HTML page with results. It holds all that it needs, asks no network, follows the reader's light or dark
// colours, and says the same without scripts, which add hover, toggles and other views.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "tools/page/bars.h"
#include "tools/page/curves.h"
#include "tools/page/heat_map.h"

namespace keyhole::tools {

/// A table of figures.
struct PageTable {
  struct Column {
    std::string title;
    bool text = false;  ///< aligned to the left
  };
  std::vector<Column> columns;
  std::vector<std::vector<std::string>> rows;  ///< a cell for each column
  std::vector<bool> marked;                    ///< rows that stand out; empty: none
};

class Page {
 public:
  /// All text given to a page is escaped by it.
  explicit Page(std::string title);

  /// Adds a line below the title, e.g. the machine.
  void fact(const std::string& name, const std::string& text);
  /// Begins a section, to which what follows belongs.
  void section(const std::string& title, const std::string& note = "");
  void paragraph(const std::string& text);
  void add(const Curves& curves);
  void add(const std::vector<HeatMap>& maps);
  void add(const Bars& bars);
  void add(const PageTable& table);
  /// Adds text as it was typed, e.g. a command.
  void verbatim(const std::string& text);

  /// The whole file. `result`: the JSON result, which the page carries along and offers for saving.
  [[nodiscard]] std::string html(const nlohmann::ordered_json& result) const;

 private:
  void end_section();

  std::string title_, facts_, body_;
  bool in_section_ = false;
};

}  // namespace keyhole::tools
