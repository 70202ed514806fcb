#include "tools/python/src/fields.h"

#include <cstddef>
#include <string>
#include <type_traits>

namespace nb = nanobind;

namespace keyhole::python {
namespace {

template <class Struct>
struct Field {
  const char* name;
  bool (*set)(Struct&, nb::handle);
  nb::object (*get)(const Struct&);
};

template <class T>
nb::object to_python(const T& value) {
  if constexpr (std::is_same_v<T, const char*>) {
    return value ? nb::object(nb::str(value)) : nb::none();
  } else if constexpr (std::is_array_v<T>) {
    return nb::str(static_cast<const char*>(value));
  } else {
    return nb::cast(value);
  }
}

template <class T>
bool to_c(nb::handle value, T& out) {
  if constexpr (std::is_same_v<T, const char*>) {
    if (value.is_none()) {
      out = nullptr;
      return true;
    }
    out = nb::isinstance<nb::str>(value) ? PyUnicode_AsUTF8AndSize(value.ptr(), nullptr) : nullptr;
    return out != nullptr;
  } else {
    return nb::try_cast(value, out);
  }
}

// clang-format off
#define FIELD(member)                                                                            \
  {#member, [](Owner& owner, nb::handle value) { return to_c(value, owner.member); },            \
   [](const Owner& owner) { return to_python(owner.member); }}
#define RESULT(member) \
  {#member, nullptr, [](const Owner& owner) { return to_python(owner.member); }}
// clang-format on

/// The budget that a struct has.
template <class Owner>
constexpr Field<Owner> kBudget = {
    "budget",
    [](Owner& owner, nb::handle value) {
      if (!nb::isinstance<nb::dict>(value)) return false;
      fill(owner.budget, nb::borrow<nb::dict>(value));
      return true;
    },
    [](const Owner& owner) { return nb::object(as_dict(owner.budget)); }};

template <class Struct>
struct Table;

// clang-format off

template <>
struct Table<keyhole_engine_config> {
  using Owner = keyhole_engine_config;
  static constexpr Field<Owner> fields[] = {
      FIELD(layers), FIELD(q_heads), FIELD(kv_heads), FIELD(head_dim), FIELD(kv_dtype),
      FIELD(scale), FIELD(softcap), FIELD(rope_theta), FIELD(rope_scaling), FIELD(rope_factor),
      FIELD(rope_low_freq_factor), FIELD(rope_high_freq_factor), FIELD(rope_original_context),
      FIELD(device), FIELD(threads), FIELD(pin_threads), FIELD(spin_us), FIELD(cpu_level),
      FIELD(classifiers), FIELD(device_ordinal), FIELD(signal), FIELD(timeout_ms), FIELD(rope_dim),
      FIELD(rope_beta_fast), FIELD(rope_beta_slow), FIELD(rope_whole_pairs), FIELD(value_dim),
      FIELD(values_in_keys), FIELD(rope_interleaved), FIELD(device_capability)};
};

template <>
struct Table<keyhole_layer_config> {
  using Owner = keyhole_layer_config;
  static constexpr Field<Owner> fields[] = {
      FIELD(window), FIELD(window_slack), FIELD(scale), FIELD(softcap), FIELD(rope_theta),
      FIELD(rope_scaling), FIELD(rope_factor), FIELD(rope_low_freq_factor),
      FIELD(rope_high_freq_factor), FIELD(rope_original_context), FIELD(rope_dim),
      FIELD(rope_beta_fast), FIELD(rope_beta_slow), FIELD(rope_whole_pairs), FIELD(head_dim),
      FIELD(kv_heads), FIELD(q_heads), FIELD(rope_interleaved)};
};

template <>
struct Table<keyhole_budget> {
  using Owner = keyhole_budget;
  static constexpr Field<Owner> fields[] = {
      FIELD(top_k), FIELD(attend), FIELD(min_weight), FIELD(tail), FIELD(error_target),
      FIELD(mass_target), FIELD(min_keys), FIELD(max_keys)};
};

template <>
struct Table<keyhole_session_config> {
  using Owner = keyhole_session_config;
  static constexpr Field<Owner> fields[] = {
      FIELD(max_tokens), FIELD(sink), FIELD(window), FIELD(flush_block), FIELD(mode), FIELD(index),
      kBudget<Owner>, FIELD(tail_partition), FIELD(offload_placement), FIELD(budgets),
      FIELD(append_block), FIELD(append_mode), FIELD(training_queries), FIELD(host_memory_limit),
      FIELD(device_memory_limit), FIELD(audit_share), FIELD(audit_action), FIELD(audit_bound),
      FIELD(kv_host), FIELD(pinned_memory_limit), FIELD(exact_rows_by)};
};

template <>
struct Table<keyhole_search_options> {
  using Owner = keyhole_search_options;
  static constexpr Field<Owner> fields[] = {
      kBudget<Owner>, FIELD(position)};
};

template <>
struct Table<keyhole_statistics> {
  using Owner = keyhole_statistics;
  static constexpr Field<Owner> fields[] = {
      RESULT(attends), RESULT(keys_scored), RESULT(keys_offered), RESULT(keys_attended),
      RESULT(bytes_read), RESULT(attend_seconds), RESULT(search_seconds), RESULT(offload_seconds),
      RESULT(resident_seconds), RESULT(append_seconds), RESULT(build_seconds), RESULT(tokens),
      RESULT(host_bytes), RESULT(index_bytes), RESULT(device_bytes), RESULT(device),
      RESULT(cpu_level), RESULT(threads), RESULT(append_blocks), RESULT(append_waits),
      RESULT(append_wait_seconds), RESULT(background_seconds), RESULT(tail_bytes),
      RESULT(tail_seconds), RESULT(keys_opened), RESULT(targets_missed), RESULT(stream_steps),
      RESULT(device_wait_seconds), RESULT(serve_seconds), RESULT(pinned_bytes),
      RESULT(device_bytes_peak), RESULT(host_bytes_peak), RESULT(signal), RESULT(code_bytes),
      RESULT(code_layers), RESULT(rows_by_host), RESULT(shared_bytes), RESULT(codes_doubted),
      RESULT(codes_given_up)};
};

template <>
struct Table<keyhole_audit> {
  using Owner = keyhole_audit;
  static constexpr Field<Owner> fields[] = {
      RESULT(audits), RESULT(waits), RESULT(over_bound), RESULT(actions), RESULT(error_mean),
      RESULT(error_median), RESULT(error_p95), RESULT(error_max), RESULT(mass_mean),
      RESULT(mass_p05), RESULT(recall), RESULT(missing_mean), RESULT(estimated_missing_mean),
      RESULT(missing_error_mean), RESULT(seconds), RESULT(error_p99)};
};

template <>
struct Table<keyhole_layer_tokens> {
  using Owner = keyhole_layer_tokens;
  static constexpr Field<Owner> fields[] = {
      RESULT(total), RESULT(sink), RESULT(window), RESULT(indexed), RESULT(pending)};
};

template <>
struct Table<keyhole_memory_plan> {
  using Owner = keyhole_memory_plan;
  static constexpr Field<Owner> fields[] = {
      RESULT(kv_bytes), RESULT(host_bytes), RESULT(index_bytes), RESULT(device_bytes),
      RESULT(pinned_bytes), RESULT(fits), RESULT(longest_context), RESULT(code_bytes),
      RESULT(pinned_kv_bytes), RESULT(index), RESULT(code_layers), RESULT(first_code_layer),
      RESULT(rows_by_host)};
};

template <>
struct Table<keyhole_memory_use> {
  using Owner = keyhole_memory_use;
  static constexpr Field<Owner> fields[] = {
      RESULT(sessions), RESULT(host_bytes), RESULT(kv_bytes), RESULT(resident_bytes),
      RESULT(index_bytes), RESULT(work_bytes), RESULT(shared_page_bytes), RESULT(pinned_bytes),
      RESULT(device_bytes), RESULT(code_bytes)};
};

template <>
struct Table<keyhole_identity> {
  using Owner = keyhole_identity;
  static constexpr Field<Owner> fields[] = {
      RESULT(model), RESULT(token_count), RESULT(token_hash)};
};

template <>
struct Table<keyhole_search_cost> {
  using Owner = keyhole_search_cost;
  static constexpr Field<Owner> fields[] = {
      RESULT(keys_scored), RESULT(bytes_read), RESULT(keys_attended), RESULT(keys_opened),
      RESULT(tail_bytes_read), RESULT(tail_seconds)};
};

template <>
struct Table<keyhole_index_info> {
  using Owner = keyhole_index_info;
  static constexpr Field<Owner> fields[] = {
      RESULT(keys), RESULT(bytes), RESULT(build_seconds), RESULT(params), RESULT(diagnostics),
      RESULT(tail_bytes), RESULT(tail_build_seconds)};
};

// clang-format on

template <class Struct>
void fill_struct(Struct& target, const nb::dict& values, const char* what) {
  for (const auto& [key, value] : values) {
    const std::string name = nb::cast<std::string>(key);
    const Field<Struct>* found = nullptr;
    for (const Field<Struct>& field : Table<Struct>::fields)
      if (name == field.name) found = &field;
    if (!found) throw nb::type_error((std::string(what) + " has no field " + name).c_str());
    if (!found->set(target, value)) {
      PyErr_Clear();
      throw nb::type_error(
          (std::string(what) + ": " + name + " cannot be " + nb::cast<std::string>(nb::repr(value)))
              .c_str());
    }
  }
}

template <class Struct>
nb::dict struct_as_dict(const Struct& source) {
  nb::dict values;
  for (const Field<Struct>& field : Table<Struct>::fields) values[field.name] = field.get(source);
  return values;
}

template <class Struct>
nb::list names_of() {
  nb::list names;
  for (const Field<Struct>& field : Table<Struct>::fields) names.append(nb::str(field.name));
  return names;
}

nb::tuple first_of(const float* values, size_t count) {
  nb::list list;
  for (size_t i = 0; i < count; ++i) list.append(nb::float_(values[i]));
  return nb::tuple(list);
}

}  // namespace

void fill(keyhole_engine_config& config, nb::dict values) {
  fill_struct(config, values, "an engine's config");
}
void fill(keyhole_layer_config& config, nb::dict values) {
  fill_struct(config, values, "a layer's config");
}
void fill(keyhole_session_config& config, nb::dict values) {
  fill_struct(config, values, "a session's config");
}
void fill(keyhole_budget& budget, nb::dict values) { fill_struct(budget, values, "a budget"); }
void fill(keyhole_search_options& options, nb::dict values) {
  fill_struct(options, values, "search options");
}

nb::dict as_dict(const keyhole_engine_config& config) { return struct_as_dict(config); }
nb::dict as_dict(const keyhole_session_config& config) { return struct_as_dict(config); }
nb::dict as_dict(const keyhole_budget& budget) { return struct_as_dict(budget); }
nb::dict as_dict(const keyhole_statistics& statistics) { return struct_as_dict(statistics); }
nb::dict as_dict(const keyhole_audit& audit) { return struct_as_dict(audit); }
nb::dict as_dict(const keyhole_layer_tokens& tokens) { return struct_as_dict(tokens); }
nb::dict as_dict(const keyhole_memory_plan& plan) { return struct_as_dict(plan); }
nb::dict as_dict(const keyhole_memory_use& memory) { return struct_as_dict(memory); }
nb::dict as_dict(const keyhole_identity& identity) { return struct_as_dict(identity); }
nb::dict as_dict(const keyhole_index_info& info) { return struct_as_dict(info); }

nb::dict as_dict(const keyhole_search_cost& cost, size_t queries) {
  nb::dict values = struct_as_dict(cost);
  const size_t count = queries < 16 ? queries : 16;
  values["missing"] = first_of(cost.missing, count);
  values["error"] = first_of(cost.error, count);
  return values;
}

nb::dict field_names() {
  nb::dict names;
  names["keyhole_engine_config"] = names_of<keyhole_engine_config>();
  names["keyhole_layer_config"] = names_of<keyhole_layer_config>();
  names["keyhole_budget"] = names_of<keyhole_budget>();
  names["keyhole_session_config"] = names_of<keyhole_session_config>();
  names["keyhole_statistics"] = names_of<keyhole_statistics>();
  names["keyhole_audit"] = names_of<keyhole_audit>();
  names["keyhole_layer_tokens"] = names_of<keyhole_layer_tokens>();
  names["keyhole_memory_plan"] = names_of<keyhole_memory_plan>();
  names["keyhole_memory_use"] = names_of<keyhole_memory_use>();
  names["keyhole_identity"] = names_of<keyhole_identity>();
  nb::list cost = names_of<keyhole_search_cost>();
  cost.append(nb::str("missing"));
  cost.append(nb::str("error"));
  names["keyhole_search_cost"] = cost;
  names["keyhole_index_info"] = names_of<keyhole_index_info>();
  return names;
}

}  // namespace keyhole::python
