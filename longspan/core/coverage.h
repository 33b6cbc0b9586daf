#pragma once

namespace longspan {

/// None, some or all of a query range x key range is visible.
enum class Coverage { none, some, all };

}  // namespace longspan
