// BRIDGE of the query-guided graph: where the nearest keys of a training query fall into several connected components
// of the links between them, the components are linked (the idea of NGFix, arXiv 2510.22316, with components in place
// of its hardness). A walk that has found some of these keys then finds the others among them.
#pragma once

#include "index/graph/guided_lists.h"
#include "index/graph/lifted_keys.h"
#include "index/graph/training_neighbours.h"

namespace keyhole::index {

/// Adds the links that are missing, where the lists of both ends have free slots.
void add_bridges(DirectLists& lists, const LiftedKeys& keys, const Neighbours& neighbours,
                 Workers& workers);

}  // namespace keyhole::index
