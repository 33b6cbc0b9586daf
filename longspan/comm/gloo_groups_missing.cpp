#include <stdexcept>

#include "longspan/comm/detail/gloo_groups.h"

namespace longspan {

std::shared_ptr<MeetingPlace> meet_here(std::chrono::milliseconds) {
  throw std::runtime_error(why_no_gloo());
}

std::shared_ptr<MeetingPlace> meet_at(const Launch&, const std::string&) {
  throw std::runtime_error(why_no_gloo());
}

Group make_gloo_group(const GlooGroup&) {
  throw std::runtime_error(why_no_gloo());
}

void close_gloo_group(const Group&) {}

std::string why_no_gloo() {
  return "groups over gloo are not available, because gloo's headers were "
         "missing when Longspan was built; install them (libgloo-dev) and "
         "build again, or make the group in Python";
}

}  // namespace longspan
