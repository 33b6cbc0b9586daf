#pragma once

#include <string>

namespace longspan {

/// How rows of keys reach the queries that listed them.
enum class Fetch {
  gathered,  ///< all of them, in the order of the stream
  needed,    ///< those that some query here listed; sizes depend on the data
};

/// "gathered" or "needed"; `who` names the caller in messages.
Fetch fetch_named(const char* who, const std::string& name);
std::string name_of(Fetch fetch);

}  // namespace longspan
