#include "runtime/save/settings_io.h"

#include <algorithm>

#include "index/types/factory.h"
#include "runtime/plan/refusals.h"

namespace keyhole::runtime {
namespace {

void save_budget(const keyhole_budget& budget, ChecksumWriter& out) {
  for (const Setting& s : kBudgetSettings) {
    visit_number(s, &budget, [&](const auto& x) { out.value(x); });
  }
}

keyhole_budget load_budget(ChecksumReader& in) {
  keyhole_budget b = initial_config().budget;
  for (const Setting& s : kBudgetSettings) {
    visit_number(s, &b, [&](auto& x) { x = in.value<std::remove_cvref_t<decltype(x)>>(s.name); });
  }
  return b;
}

/// The texts and arrays to which a loaded config points while it is checked.
struct Texts {
  std::string index, budgets;
  std::vector<uint32_t> dense_layers;
};

keyhole_session_config load_config(ChecksumReader& in, Texts& texts) {
  keyhole_session_config c = initial_config();
  for (const Setting& s : kSessionSettings) {
    const bool is_number = visit_number(
        s, &c, [&](auto& x) { x = in.value<std::remove_cvref_t<decltype(x)>>(s.name); });
    if (is_number) continue;
    if (s.kind == SettingKind::budget) {
      field<keyhole_budget>(s, &c) = load_budget(in);
    } else if (s.kind == SettingKind::layers) {
      texts.dense_layers = in.array<uint32_t>(in.value<uint64_t>(s.name), s.name);
    } else {
      (&field<const char*>(s, &c) == &c.index ? texts.index : texts.budgets) = in.text(s.name);
    }
  }
  c.index = texts.index.c_str();
  c.dense_layers = texts.dense_layers.data();
  c.dense_layer_count = static_cast<uint32_t>(texts.dense_layers.size());
  return c;
}

/// Runs `check`, and turns its invalid argument into Error(corrupt), because no session has saved it.
template <class Check>
auto corrupt_if_refused(Check&& check) {
  try {
    return check();
  } catch (const Error& e) {
    if (e.status() != Status::invalid_argument) throw;
    corrupt(std::string("parameters: ") + e.what());
  }
}

}  // namespace

void save_params(const SessionParams& params, ChecksumWriter& out) {
  const keyhole_session_config c = public_config(params);
  for (const Setting& s : kSessionSettings) {
    if (visit_number(s, &c, [&](const auto& x) { out.value(x); })) continue;
    if (s.kind == SettingKind::budget) {
      save_budget(field<keyhole_budget>(s, &c), out);
    } else if (s.kind == SettingKind::layers) {
      out.value(static_cast<uint64_t>(params.dense_layers.size()));
      for (const uint32_t layer : params.dense_layers) out.value(layer);
    } else {
      const char* text = field<const char*>(s, &c);
      out.text(text == nullptr ? "" : text);
    }
  }
}

SessionParams load_params(ChecksumReader& in, const ModelShape& model) {
  Texts texts;
  const keyhole_session_config c = load_config(in, texts);
  SessionParams params = corrupt_if_refused([&] { return check_session(c, model); });
  params.budgets = texts.budgets;
  return params;
}

// Index specs are few: each is written once, and heads name them by number.
void save_heads(std::span<const HeadParams* const> heads, ChecksumWriter& out) {
  std::vector<const std::string*> specs;
  std::vector<uint32_t> spec_of;
  for (const HeadParams* head : heads) {
    const auto found = std::find_if(specs.begin(), specs.end(),
                                    [&](const std::string* spec) { return *spec == head->index; });
    spec_of.push_back(static_cast<uint32_t>(found - specs.begin()));
    if (found == specs.end()) specs.push_back(&head->index);
  }
  out.value(static_cast<uint32_t>(specs.size()));
  for (const std::string* spec : specs) out.text(*spec);
  for (size_t i = 0; i < heads.size(); ++i) {
    out.value(spec_of[i]);
    out.value(static_cast<uint32_t>(heads[i]->dense));
    save_budget(heads[i]->budget, out);
  }
}

std::vector<HeadParams> load_heads(ChecksumReader& in, size_t heads) {
  const auto spec_count = in.value<uint32_t>("index specs");
  if (spec_count > heads) corrupt("it has more index specs than heads");
  std::vector<std::string> specs;
  for (uint32_t i = 0; i < spec_count; ++i) specs.push_back(in.text("index specs"));
  return corrupt_if_refused([&] {
    for (const std::string& spec : specs) index::check_spec(spec);
    std::vector<HeadParams> out;
    for (size_t i = 0; i < heads; ++i) {
      const auto spec = in.value<uint32_t>("a head's parameters");
      const auto dense = in.value<uint32_t>("a head's parameters");
      if (spec >= specs.size() || dense > 1) {
        corrupt("head " + std::to_string(i) + " has index spec " + std::to_string(spec) + " of " +
                std::to_string(specs.size()) + " and dense " + std::to_string(dense) +
                ", allowed: 0 or 1");
      }
      out.push_back({specs[spec], check_budget(load_budget(in)), dense != 0});
    }
    return out;
  });
}

void save_shape(const ModelShape& m, ChecksumWriter& out) {
  const LayerShape most = m.largest();
  for (const uint32_t v : {m.layers, most.q_heads, most.kv_heads, most.head_dim, most.value_dim,
                           static_cast<uint32_t>(m.kv_dtype)}) {
    out.value(v);
  }
}

namespace {

void check_saved(const std::string& name, uint32_t saved, uint32_t needed) {
  if (saved == needed) return;
  throw Error(Status::invalid_argument, "the file was saved with " + name + " " +
                                            std::to_string(saved) + ", the engine has " +
                                            std::to_string(needed));
}

}  // namespace

void check_shape(ChecksumReader& in, const ModelShape& m) {
  const LayerShape most = m.largest();
  const auto check = [&](const char* name, uint32_t needed) {
    check_saved(name, in.value<uint32_t>("shape"), needed);
  };
  check("layers", m.layers);
  check("q_heads", most.q_heads);
  check("kv_heads", most.kv_heads);
  check("head_dim", most.head_dim);
  check("value_dim", most.value_dim);
  check("kv_dtype", static_cast<uint32_t>(m.kv_dtype));
}

void save_layer_shapes(const ModelShape& m, ChecksumWriter& out) {
  out.value(static_cast<uint32_t>(m.shapes.size()));
  for (const LayerShape& s : m.shapes) {
    for (const uint32_t v : {s.q_heads, s.kv_heads, s.head_dim, s.value_dim}) out.value(v);
  }
}

void check_layer_shapes(ChecksumReader& in, const ModelShape& m, bool has_any) {
  const auto number = [&] { return in.value<uint32_t>("shapes of layers"); };
  const uint32_t count = has_any ? number() : 0;
  if (count != 0 && count != m.layers) {
    corrupt("it has shapes of " + std::to_string(count) + " layers, allowed: 0, or all " +
            std::to_string(m.layers));
  }
  for (uint32_t layer = 0; layer < m.layers; ++layer) {
    LayerShape saved = m.largest();  // as check_shape() has found
    if (count != 0) {
      for (uint32_t* v : {&saved.q_heads, &saved.kv_heads, &saved.head_dim, &saved.value_dim}) {
        *v = number();
      }
    }
    const LayerShape needed = m.of(layer);
    const std::string of = " of layer " + std::to_string(layer);
    check_saved("q_heads" + of, saved.q_heads, needed.q_heads);
    check_saved("kv_heads" + of, saved.kv_heads, needed.kv_heads);
    check_saved("head_dim" + of, saved.head_dim, needed.head_dim);
    check_saved("value_dim" + of, saved.value_dim, needed.value_dim);
  }
}

void save_windows(const ModelShape& m, ChecksumWriter& out) {
  for (uint32_t layer = 0; layer < m.layers; ++layer) {
    const Window w = m.windows.empty() ? Window{} : m.windows[layer];
    out.value(w.tokens);
    out.value(w.slack);
  }
}

void check_windows(ChecksumReader& in, const ModelShape& m) {
  for (uint32_t layer = 0; layer < m.layers; ++layer) {
    const Window needed = m.windows.empty() ? Window{} : m.windows[layer];
    const auto tokens = in.value<uint32_t>("windows");
    const auto slack = in.value<uint32_t>("windows");
    if (tokens == needed.tokens && slack == needed.slack) continue;
    const auto text = [](uint32_t window, uint32_t behind) {
      return window == 0 ? std::string("no window")
                         : "a window of " + std::to_string(window) + " and " +
                               std::to_string(behind) + " tokens behind it";
    };
    throw Error(Status::invalid_argument, "the file was saved with " + text(tokens, slack) +
                                              " in layer " + std::to_string(layer) +
                                              ", the engine has " +
                                              text(needed.tokens, needed.slack));
  }
}

}  // namespace keyhole::runtime
