#include <stdexcept>

#include "longspan/comm/gloo_groups.h"

namespace longspan {

c10::intrusive_ptr<c10d::ProcessGroup> make_gloo_group(const GlooGroup&) {
  throw std::runtime_error(why_no_gloo());
}

void close_gloo_group(const c10::intrusive_ptr<c10d::ProcessGroup>&,
                      const std::string&) {}

std::string why_no_gloo() {
  return "groups over gloo are not available, because gloo's headers were "
         "missing when Longspan was built; install them (libgloo-dev) and "
         "build again, or make the group in Python";
}

}  // namespace longspan
