#include "longspan/ops/linear_cross_entropy.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <cmath>

#include "longspan/core/detail/check.h"
#include "longspan/kernels/levels/levels.h"
#include "longspan/kernels/token_loss/token_loss.h"
#include "longspan/ops/checks.h"
#include "longspan/ops/cuda_stream.h"
#include "longspan/ops/partial_attention.h"
#include "longspan/ops/profiler_range.h"
#include "longspan/ops/registering.h"
#include "longspan/ops/tensors.h"
#include "longspan/ops/threads.h"
#include "longspan/ops/token_arrays.h"
#include "longspan/ops/token_losses_by_torch.h"

namespace longspan {

namespace {

/// Gradients that are asked for; a sum of these.
constexpr int64_t kHidden = 1, kWeight = 2, kBias = 4;

/// Logits that exist at a time, in bytes. On a device their products run at
/// full speed from some thousand tokens on; on the CPU from a hundred, and what
/// fits a cache need not come back from memory.
constexpr int64_t kDeviceTile = int64_t{2} << 30, kHostTile = int64_t{18} << 20;

/// The arguments that both operators have.
struct LossInputs {
  at::Tensor hidden, weight, labels;
  OptionalTensor bias;
  CrossEntropyOptions options = {};

  template <class Self>
  static auto fields(Self& self) {
    return std::tie(self.hidden, self.weight, self.labels, self.bias,
                    self.options.scale, self.options.softcap,
                    self.options.ignore_index, self.options.label_smoothing,
                    self.options.z_loss, self.options.tile);
  }
  void cast(const Casts& to) {
    hidden = to(hidden);
    weight = to(weight);
    if (bias) bias = to(*bias);
  }
};

void check_inputs(const char* who, const LossInputs& in) {
  const CrossEntropyOptions& options = in.options;
  check(in.hidden.is_floating_point() && in.hidden.dim() == 2, who,
        ": `hidden` is ", describe(in.hidden),
        "; expected floating [tokens, channels]");
  check(in.weight.dim() == 2 &&
            in.weight.sym_size(1) == in.hidden.sym_size(1) &&
            in.weight.scalar_type() == in.hidden.scalar_type() &&
            in.weight.device() == in.hidden.device(),
        who, ": `weight` is ", describe(in.weight), " but `hidden` ",
        describe(in.hidden),
        "; expected [words, channels] of the same type and device");
  check(in.labels.scalar_type() == at::kLong && in.labels.dim() == 1 &&
            in.labels.sym_size(0) == in.hidden.sym_size(0) &&
            in.labels.device() == in.hidden.device(),
        who, ": `labels` is ", describe(in.labels),
        "; expected int64 [tokens] for `hidden` ", describe(in.hidden));
  check(!in.bias || (in.bias->dim() == 1 &&
                     in.bias->sym_size(0) == in.weight.sym_size(0) &&
                     in.bias->scalar_type() == in.weight.scalar_type() &&
                     in.bias->device() == in.weight.device()),
        who, ": `bias` is ",
        in.bias ? describe(*in.bias) : std::string("missing"),
        "; expected [words] for `weight` ", describe(in.weight));
  check(options.softcap >= 0 && options.softcap < INFINITY, who,
        ": `softcap` is ", options.softcap,
        "; expected a positive number, or 0 for none");
  check(std::isfinite(options.scale), who, ": `scale` is ", options.scale,
        "; expected a finite number");
  check(options.label_smoothing >= 0 && options.label_smoothing <= 1, who,
        ": `label_smoothing` is ", options.label_smoothing,
        "; expected 0 to 1");
  check(options.z_loss >= 0 && options.z_loss < INFINITY, who, ": `z_loss` is ",
        options.z_loss, "; expected 0 or more");
  check(options.tile >= 0, who, ": `tile` is ", options.tile,
        "; expected the tokens of a tile, or 0");
}

/// On a device the answer is NaN instead: looking would make the host wait.
void check_labels(const char* who, const LossInputs& in) {
  if (!in.labels.is_cpu()) return;
  const at::Tensor labels = in.labels.contiguous();
  const int64_t* const all = labels.const_data_ptr<int64_t>();
  for (int64_t t = 0; t < labels.numel(); ++t) {
    const bool known = all[t] == in.options.ignore_index ||
                       (all[t] >= 0 && all[t] < in.weight.size(0));
    check(known, who, ": label ", all[t], " of token ", t, " is none of the ",
          in.weight.size(0), " words, and not ignore_index ",
          in.options.ignore_index);
  }
}

int64_t tokens_of_tile(const LossInputs& in) {
  const int64_t tokens = std::max<int64_t>(1, in.hidden.size(0));
  if (in.options.tile > 0) return std::min(in.options.tile, tokens);
  const int64_t bytes = std::max<int64_t>(1, in.weight.size(0)) *
                        (in.hidden.scalar_type() == at::kDouble ? 8 : 4);
  const int64_t step = in.hidden.is_cuda() ? 128 : 16;
  const int64_t most = in.hidden.is_cuda() ? kDeviceTile : kHostTile;
  const int64_t fits = std::max<int64_t>(1, most / bytes / step) * step;
  // Even ones, so that the last is not a small one.
  const int64_t tiles = (tokens + fits - 1) / fits;
  const int64_t even = (tokens + tiles - 1) / tiles;
  return std::min(tokens, (even + step - 1) / step * step);
}

bool is_half(at::ScalarType type) {
  return type == at::kBFloat16 || type == at::kHalf;
}

/// What an answer begins as. Sums of half types are kept in float32.
struct Found {
  at::Tensor losses, lse, entropy, right, dhidden, dweight, dbias;

  static Found of(const LossInputs& in, int64_t wanted) {
    const auto sums = sums_like(in.hidden);
    const c10::SymInt tokens = in.hidden.sym_size(0);
    const auto numbers = [&] { return at::empty_symint({tokens}, sums); };
    const auto made = [&](int64_t which, const at::Tensor& like) {
      return wanted & which ? at::zeros_symint(like.sym_sizes(), sums)
                            : at::empty({0}, sums);
    };
    return {.losses = numbers(),
            .lse = numbers(),
            .entropy = numbers(),
            .right = at::empty_symint({tokens}, sums.dtype(at::kBool)),
            .dhidden = wanted & kHidden ? empty_as(in.hidden)
                                        : at::empty({0}, in.hidden.options()),
            .dweight = made(kWeight, in.weight),
            .dbias = in.bias ? made(kBias, *in.bias) : at::empty({0}, sums)};
  }
};

/// The walk over tiles of tokens.
class Sweep {
 public:
  Sweep(const LossInputs& in, const at::Tensor& weights, int64_t wanted)
      : in_(in),
        hidden_(in.hidden.contiguous()),
        weight_(in.weight.contiguous()),
        labels_(in.labels.contiguous()),
        bias_(in.bias ? in.bias->to(sums_like(in.hidden)).contiguous()
                      : at::Tensor()),
        weights_(weights),
        wanted_(wanted),
        found_(Found::of(in, wanted)) {}

  Found run() {
    const int64_t tokens = hidden_.size(0), step = tokens_of_tile(in_);
    const auto empty = [&](const at::TensorOptions& options) {
      return at::empty({std::min(step, tokens), weight_.size(0)}, options);
    };
    logits_ = empty(sums_like(hidden_));
    if (wanted_ != 0 && has_kernel() && hidden_.is_cuda() &&
        is_half(hidden_.scalar_type())) {
      gradient_ = empty(hidden_.options());
    }
    for (int64_t first = 0; first < tokens; first += step) {
      tile(first, std::min(step, tokens - first));
    }
    return std::move(found_);
  }

 private:
  bool has_kernel() const {
    return hidden_.is_cpu() || (hidden_.is_cuda() && !why_not_token_losses());
  }

  void tile(int64_t first, int64_t count) {
    const auto part = [&](const at::Tensor& t) {
      return t.defined() ? t.narrow(0, first, count) : t;
    };
    const at::Tensor rows = part(hidden_);
    at::Tensor logits = logits_.narrow(0, 0, count);
    multiply(logits, rows, weight_.t(), /*add=*/false);
    const at::Tensor d = losses_of(logits, first, count);
    if (wanted_ & kHidden) {
      at::Tensor to = part(found_.dhidden);
      at::mm_out(to, d, weight_);
    }
    if (wanted_ & kWeight) multiply(found_.dweight, d.t(), rows, first > 0);
    if (wanted_ & kBias) {
      found_.dbias.add_(
          d.sum(at::IntArrayRef{0}, false, found_.dbias.scalar_type()));
    }
  }

  /// to = a b, or to += a b, in the accumulation type.
  void multiply(at::Tensor& to, const at::Tensor& a, const at::Tensor& b,
                bool add) const {
    if (a.scalar_type() == to.scalar_type()) {
      if (add) {
        to.addmm_(a, b);
      } else {
        at::mm_out(to, a, b);
      }
    } else if (a.is_cuda()) {
      if (add) {
        at::addmm_out(to, to, a, b, to.scalar_type());
      } else {
        at::mm_out(to, a, b, to.scalar_type());
      }
    } else if (add) {
      to.add_(at::mm(a, b));
    } else {
      to.copy_(at::mm(a, b));
    }
  }

  /// The losses of a tile, and what it passes on to its logits, in the type
  /// that the products want.
  at::Tensor losses_of(const at::Tensor& logits, int64_t first, int64_t count) {
    at::Tensor d = gradient_.defined() ? gradient_.narrow(0, 0, count) : logits;
    if (!has_kernel()) {
      d = by_torch(logits, first, count);
    } else if (logits.scalar_type() == at::kDouble) {
      launch<double>(logits, d, first, count);
    } else {
      launch<float>(logits, d, first, count);
    }
    return d.to(hidden_.scalar_type());
  }

  at::Tensor by_torch(const at::Tensor& logits, int64_t first,
                      int64_t count) const {
    const auto part = [&](const at::Tensor& t) {
      return t.defined() ? t.narrow(0, first, count) : t;
    };
    const LossesOfTile made = token_losses_by_torch(
        logits, bias_, part(labels_), part(weights_), kernel_options());
    part(found_.losses).copy_(made.losses);
    part(found_.lse).copy_(made.lse);
    part(found_.entropy).copy_(made.entropy);
    part(found_.right).copy_(made.right);
    return made.dlogits;
  }

  TokenLossOptions kernel_options() const {
    const CrossEntropyOptions& o = in_.options;
    return {.scale = o.scale,
            .softcap = o.softcap,
            .smoothing = o.label_smoothing,
            .z_loss = o.z_loss,
            .ignored = o.ignore_index};
  }

  template <class T>
  void launch(const at::Tensor& logits, const at::Tensor& d, int64_t first,
              int64_t count) const {
    const auto array = [&](const at::Tensor& t) {
      return t.defined() ? t.mutable_data_ptr<T>() + first : nullptr;
    };
    const TokenLossArgs<T> args{
        .tokens = count,
        .words = weight_.size(0),
        .options = kernel_options(),
        .logits = logits.mutable_data_ptr<T>(),
        .bias = bias_.defined() ? bias_.const_data_ptr<T>() : nullptr,
        .labels = labels_.const_data_ptr<int64_t>() + first,
        .weight = array(weights_),
        .loss = array(found_.losses),
        .lse = array(found_.lse),
        .entropy = array(found_.entropy),
        .right = found_.right.mutable_data_ptr<bool>() + first,
        .with_gradient = wanted_ != 0,
        .gradient = d.mutable_data_ptr(),
        .gradient_type = *element_type(d.scalar_type())};
    const ProfilerRange range([&] {
      return join("kernel token_losses, ",
                  hidden_.is_cpu() ? chosen_attention_kernels().name : "ampere",
                  ", tokens ", first, " to ", first + count - 1);
    });
    if (hidden_.is_cpu()) {
      token_losses(args, threads_for(32 * count * weight_.size(0)));
      return;
    }
    const c10::OptionalDeviceGuard guard(hidden_.device());
    token_losses(args, current_stream(hidden_));
  }

  const LossInputs& in_;
  const at::Tensor hidden_, weight_, labels_, bias_, weights_;
  const int64_t wanted_;
  Found found_;
  at::Tensor logits_, gradient_;
};

/// The form in which gradients wait for backward: that of the parameter, where
/// a sum over many tokens fits it.
at::Tensor kept_form(const at::Tensor& sums, const at::Tensor& like) {
  return like.scalar_type() == at::kBFloat16 ? sums.to(at::kBFloat16) : sums;
}

using LossResult = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor,
                              at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

struct LinearCrossEntropy : LossInputs {
  int64_t wanted = 0;
  bool kept_is_ours = false;

  using Result = LossResult;
  static constexpr auto kSchema =
      "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor labels, "
      "Tensor? bias, float scale, float softcap, int ignore_index, "
      "float label_smoothing, float z_loss, int tile, int wanted) -> (Tensor, "
      "Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)";
  template <class Self>
  static auto fields(Self& self) {
    return std::tuple_cat(LossInputs::fields(self), std::tie(self.wanted));
  }

  Result meta() const {
    check_inputs("linear_cross_entropy", *this);
    return results(at::empty({}, sums_like(hidden)), Found::of(*this, wanted));
  }
  Result run() const {
    check_inputs("linear_cross_entropy", *this);
    check_labels("linear_cross_entropy", *this);
    const Found found = Sweep(*this, at::Tensor(), wanted).run();
    return results(found.losses.sum(), found);
  }

  Tensors keep(const Tensors& outputs) {
    // Nothing is left to multiply.
    hidden = weight = labels = at::Tensor();
    bias = std::nullopt;
    return {outputs.begin() + 5, outputs.end()};
  }
  Tensors constants(const Tensors& outputs) const {
    return {outputs.begin() + 1, outputs.end()};
  }
  Tensors gradients(const Tensors& kept, const Tensors& grads) const {
    // What was kept does not know what it came from.
    if (at::GradMode::is_enabled()) {
      refuse_second_derivative("linear_cross_entropy");
    }
    const auto made = [&](int64_t which, const at::Tensor& sums,
                          at::ScalarType type) {
      if (!(wanted & which)) return at::Tensor();
      // That of the weight may be a gigabyte: it exists once where it can.
      // A tensor of its own, which a parameter can take as it is.
      at::Tensor all = sums;
      return (kept_is_ours ? all.mul_(grads[0]).detach() : all * grads[0])
          .to(type);
    };
    const at::ScalarType type = kept[0].scalar_type();
    return {made(kHidden, kept[0], type), made(kWeight, kept[1], type),
            at::Tensor(), made(kBias, kept[2], type)};
  }

 private:
  Result results(const at::Tensor& loss, const Found& found) const {
    return {loss,
            found.losses,
            found.lse,
            found.entropy,
            found.right,
            found.dhidden,
            kept_form(found.dweight, weight),
            kept_form(found.dbias, weight)};
  }
};

struct LinearTokenLossesBackward : LossInputs {
  at::Tensor dlosses;
  int64_t wanted = 0;

  using Result = Tensors3;
  static constexpr auto kDerivativeOf = "linear_cross_entropy";
  static constexpr auto kSchema =
      "linear_token_losses_backward(Tensor hidden, Tensor weight, "
      "Tensor labels, Tensor? bias, float scale, float softcap, "
      "int ignore_index, float label_smoothing, float z_loss, int tile, "
      "Tensor dlosses, int wanted) -> (Tensor, Tensor, Tensor)";
  template <class Self>
  static auto fields(Self& self) {
    return std::tuple_cat(LossInputs::fields(self),
                          std::tie(self.dlosses, self.wanted));
  }
  Result meta() const { return results(Found::of(*this, wanted)); }
  Result run() const {
    const at::Tensor weights = dlosses.to(sums_like(hidden)).contiguous();
    return results(Sweep(*this, weights, wanted).run());
  }

 private:
  Result results(const Found& found) const {
    const at::ScalarType type = weight.scalar_type();
    return {found.dhidden, found.dweight.to(type), found.dbias.to(type)};
  }
};

struct LinearTokenLosses : LossInputs {
  using Result = Tensors4;
  static constexpr auto kSchema =
      "linear_token_losses(Tensor hidden, Tensor weight, Tensor labels, "
      "Tensor? bias, float scale, float softcap, int ignore_index, "
      "float label_smoothing, float z_loss, int tile) -> (Tensor, Tensor, "
      "Tensor, Tensor)";

  Result meta() const {
    check_inputs("linear_cross_entropy", *this);
    return results(Found::of(*this, 0));
  }
  Result run() const {
    check_inputs("linear_cross_entropy", *this);
    check_labels("linear_cross_entropy", *this);
    return results(Sweep(*this, at::Tensor(), 0).run());
  }

  Tensors keep(const Tensors& /*outputs*/) const { return {}; }
  Tensors constants(const Tensors& outputs) const {
    return {outputs.begin() + 1, outputs.end()};
  }
  Tensors gradients(const Tensors& /*kept*/, const Tensors& grads) const {
    const int64_t wanted = kHidden | kWeight | (bias ? kBias : 0);
    LinearTokenLossesBackward backward;
    static_cast<LossInputs&>(backward) = *this;
    backward.dlosses = grads[0];
    backward.wanted = wanted;
    auto [dhidden, dweight, dbias] =
        Operator<LinearTokenLossesBackward>::call(backward);
    return {dhidden, dweight, at::Tensor(), bias ? dbias : at::Tensor()};
  }

 private:
  static Result results(const Found& found) {
    return {found.losses, found.lse, found.entropy, found.right};
  }
};

TORCH_LIBRARY_FRAGMENT(longspan, m) {
  Operator<LinearCrossEntropy>::add_to(m);
  Operator<LinearTokenLosses>::add_to(m);
  Operator<LinearTokenLossesBackward>::add_to(m);
}

}  // namespace

TokenLosses linear_cross_entropy(const at::Tensor& hidden,
                                 const at::Tensor& weight,
                                 const at::Tensor& labels,
                                 const OptionalTensor& bias,
                                 const CrossEntropyOptions& options) {
  LinearCrossEntropy op;
  static_cast<LossInputs&>(op) = {hidden, weight, labels, bias, options};
  op.wanted = (asks_for_gradient(hidden) ? kHidden : 0) +
              (asks_for_gradient(weight) ? kWeight : 0) +
              (asks_for_gradient(bias) ? kBias : 0);
  auto [loss, losses, lse, entropy, right, dhidden, dweight, dbias] =
      Operator<LinearCrossEntropy>::call(op);
  return {loss, losses, lse, entropy, right};
}

TokenLosses linear_token_losses(const at::Tensor& hidden,
                                const at::Tensor& weight,
                                const at::Tensor& labels,
                                const OptionalTensor& bias,
                                const CrossEntropyOptions& options) {
  LinearTokenLosses op;
  static_cast<LossInputs&>(op) = {hidden, weight, labels, bias, options};
  auto [losses, lse, entropy, right] = Operator<LinearTokenLosses>::call(op);
  return {at::Tensor(), losses, lse, entropy, right};
}

}  // namespace longspan
