// The library's structs as dictionaries of Python, by one table of fields per struct.
#ifndef KEYHOLE_TOOLS_PYTHON_SRC_FIELDS_H_
#define KEYHOLE_TOOLS_PYTHON_SRC_FIELDS_H_

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdint>

#include "keyhole/index.h"
#include "keyhole/inspect.h"
#include "keyhole/layers.h"
#include "keyhole/save.h"

namespace keyhole::python {

/// Each `fill` sets the fields that the dictionary names, and throws TypeError for names and values that the struct
/// does not have. Strings stay Python's: the dictionary must live as long as the struct is used.
void fill(keyhole_engine_config& config, nanobind::dict values);
void fill(keyhole_layer_config& config, nanobind::dict values);
void fill(keyhole_session_config& config, nanobind::dict values);
void fill(keyhole_budget& budget, nanobind::dict values);
void fill(keyhole_search_options& options, nanobind::dict values);

nanobind::dict as_dict(const keyhole_engine_config& config);
nanobind::dict as_dict(const keyhole_session_config& config);
nanobind::dict as_dict(const keyhole_budget& budget);
nanobind::dict as_dict(const keyhole_statistics& statistics);
nanobind::dict as_dict(const keyhole_audit& audit);
nanobind::dict as_dict(const keyhole_layer_tokens& tokens);
nanobind::dict as_dict(const keyhole_memory_plan& plan);
nanobind::dict as_dict(const keyhole_memory_use& memory);
nanobind::dict as_dict(const keyhole_identity& identity);
/// The first `queries` of its arrays.
nanobind::dict as_dict(const keyhole_search_cost& cost, size_t queries);
nanobind::dict as_dict(const keyhole_index_info& info);

/// Names of all fields, by struct: for the test that compares them with the header and with the package's classes.
nanobind::dict field_names();

}  // namespace keyhole::python

#endif  // KEYHOLE_TOOLS_PYTHON_SRC_FIELDS_H_
