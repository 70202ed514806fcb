// CLI11 by name: for headers that pass an application on. The whole of it costs every translation unit seconds.
#pragma once

namespace CLI {
class App;
}  // namespace CLI
