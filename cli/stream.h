#pragma once

#include <optional>
#include <string>

#include "longspan/core/mask.h"
#include "longspan/core/ownership.h"

namespace CLI {
class App;
}  // namespace CLI

namespace longspan::cli {

/// Which stream, over which ranks, under which mask: the arguments that every
/// picture shares, as they came. An option that did not come is nothing.
struct StreamArguments {
  using Text = std::optional<std::string>;
  Text tokens, documents, ranks, layout, sizes;
  Text mask, window, ratio, prefix, groups, group_reach;
  Text compare;  ///< a second layout; not every command offers it
  bool pad = false;
};

void add_stream(CLI::App& command, StreamArguments& arguments);

/// The values that they stand for.
struct Stream {
  Mask mask;
  Ownership ownership;
  std::optional<Ownership> second;  ///< of --compare
};

Stream stream_of(const StreamArguments& arguments);

}  // namespace longspan::cli
