#pragma once

namespace longspan {

/// Whether the operator that runs on this thread will have a backward pass,
/// which cannot be seen below autograd.
bool gradients_flow();

/// Says so for its lifetime.
class GradientFlow {
 public:
  explicit GradientFlow(bool flows);
  GradientFlow(const GradientFlow&) = delete;
  GradientFlow& operator=(const GradientFlow&) = delete;
  ~GradientFlow();

 private:
  bool before_;
};

}  // namespace longspan
