// The checks that an engine and its layers have in common.
#pragma once

#include <string>

#include "cpu/layer_shape.h"
#include "keyhole/keyhole.h"
#include "keyhole/layers.h"

namespace keyhole::runtime {

/// Throws Error(invalid_argument) where scale, softcap or the window of a layer is outside what is allowed; `prefix`
/// stands before the names of fields.
void check_layer_shape(const keyhole_layer_config& layer, const std::string& prefix);
/// Throws Error(invalid_argument) where numbers of heads or the head dimension are outside what is allowed, likewise;
/// value_dim is not looked at.
void check_heads(const LayerShape& shape, const std::string& prefix);

}  // namespace keyhole::runtime
