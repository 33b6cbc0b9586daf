#include "longspan/draw/draw.h"

#include <utility>

#include "longspan/core/detail/check.h"
#include "longspan/core/mask.h"
#include "longspan/draw/detail/cells.h"

namespace longspan {

namespace {

Panel only_panel(Picture picture) {
  return std::move(picture.rows.front().front().front());
}

/// One side of a comparison: the stream alone, the mask, the bars.
Picture side(const Mask& mask, const Ownership& ownership,
             const DrawOptions& options) {
  Picture picture;
  picture.title = words_of(ownership);
  picture.description = ownership.to_string() + ".";
  Panel owners = only_panel(draw_ownership(ownership, mask.packing(), options));
  auto& strips = std::get<Strips>(owners);
  strips.heading = words_of(ownership);
  strips.strips.resize(1);
  strips.strips[0].label.clear();
  strips.strips[0].note.clear();
  strips.caption.clear();
  picture.rows.push_back(
      {{std::move(owners), only_panel(draw_mask(mask, ownership, options)),
        only_panel(draw_work(mask, ownership, options))}});
  return picture;
}

}  // namespace

Picture draw(const Mask& mask, const Ownership& ownership,
             const DrawOptions& options) {
  check_together("draw", mask, ownership);
  Picture picture;
  picture.title = join(counted(ownership.tokens(), "token"), " over ",
                       counted(ownership.ranks(), "rank"), ", ",
                       words_of(ownership), ", ", words_of(mask));
  picture.description =
      join("Who owns which token, who computes what at which ring step, and ",
           "the work of each rank. ", ownership.to_string(), ", ",
           mask.to_string(), ".");
  picture.rows.push_back(
      {{only_panel(draw_ownership(ownership, mask.packing(), options))}});
  PanelColumn counts;
  if (mask.ratio() == 0 && ownership.ranks() > 1) {
    counts.push_back(only_panel(draw_steps(mask, ownership, options)));
  }
  counts.push_back(only_panel(draw_work(mask, ownership, options)));
  picture.rows.push_back(
      {{only_panel(draw_mask(mask, ownership, options))}, std::move(counts)});
  return picture;
}

Picture draw_comparison(const Mask& mask, const Ownership& left,
                        const Ownership& right, const DrawOptions& options) {
  check_together("draw_comparison", mask, left);
  check_together("draw_comparison", mask, right);
  Picture picture =
      beside(side(mask, left, options), side(mask, right, options));
  picture.title = join(counted(left.tokens(), "token"), " over ",
                       counted(left.ranks(), "rank"), ", ", words_of(mask),
                       ": ", words_of(left), " and ", words_of(right));
  picture.description =
      join("Who owns which token, who computes what, and the work of each ",
           "rank, for two ownerships side by side. ", left.to_string(), ", ",
           right.to_string(), ", ", mask.to_string(), ".");
  return picture;
}

}  // namespace longspan
