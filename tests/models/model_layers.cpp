/// model_layers INPUT OUTPUT: one layer of a family over thread ranks, for
/// tests in Python to compare with the layer of transformers.
///
/// INPUT is a safetensors file. Its metadata says what to build: `family`, the
/// numbers of its configuration by the names of its struct, `tokens` and
/// `documents` (lengths/slots, as in "19,1/3"), and `cuts`, how they are cut
/// ("2 head-tail,3 uneven"). Its tensors are `hidden` and `gradient` [tokens,
/// hidden], `layer.<parameter>`, `frequencies` where positions turn, and
/// `before.<parameter>` of the layer whose selection is taken over.
/// OUTPUT gets for each cut i `i.out`, and the gradients `i.hidden` and
/// `i.layer.<parameter>`, summed over the ranks.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <cstdlib>
#include <functional>
#include <iostream>
#include <mutex>
#include <sstream>
#include <stdexcept>

#include "longspan/batch/cut.h"
#include "longspan/comm/run_ranks.h"
#include "longspan/models/layers.h"
#include "longspan/models/safetensors.h"
#include "longspan/models/weights.h"

namespace longspan {
namespace {

/// What the file says, each word once.
class Words {
 public:
  explicit Words(const SafetensorsFile& file) : words_(file.metadata()) {}
  std::string word(const std::string& name) const { return words_.at(name); }
  int64_t number(const std::string& name) const {
    return std::stoll(words_.at(name));
  }
  double real(const std::string& name) const {
    return std::stod(words_.at(name));
  }

 private:
  std::map<std::string, std::string> words_;
};

using Forward =
    std::function<at::Tensor(const at::Tensor& hidden, const LayerShare&)>;
struct Built {
  std::shared_ptr<torch::nn::Module> module;
  Forward forward;
};

template <class Layer>
Built built(std::shared_ptr<Layer> layer) {
  return {layer, [layer](const at::Tensor& hidden, const LayerShare& share) {
            return layer->forward(hidden, share);
          }};
}

Built build(const Words& words, const SafetensorsFile& file) {
  const auto n = [&](const char* name) { return words.number(name); };
  const std::string family = words.word("family");
  const at::Tensor frequencies = file.find("frequencies") != nullptr
                                     ? file.read("frequencies")
                                     : at::Tensor();
  if (family == "mamba2") {
    return built(std::make_shared<Mamba2Mixer>(
        Mamba2Config{.hidden = n("hidden"),
                     .heads = n("heads"),
                     .head_dim = n("head_dim"),
                     .states = n("states"),
                     .groups = n("groups"),
                     .taps = n("taps"),
                     .chunk = n("chunk"),
                     .with_bias = n("with_bias") != 0,
                     .with_conv_bias = n("with_conv_bias") != 0,
                     .eps = words.real("eps"),
                     .shortest_step = words.real("shortest_step"),
                     .longest_step = words.real("longest_step")}));
  }
  if (family == "delta") {
    return built(std::make_shared<GatedDeltaNet>(
        GatedDeltaConfig{.hidden = n("hidden"),
                         .key_heads = n("key_heads"),
                         .value_heads = n("value_heads"),
                         .key_dim = n("key_dim"),
                         .value_dim = n("value_dim"),
                         .taps = n("taps"),
                         .chunk = n("chunk"),
                         .eps = words.real("eps")}));
  }
  if (family == "glm_dsa") {
    GlmDsaConfig config{.hidden = n("hidden"),
                        .heads = n("heads"),
                        .q_rank = n("q_rank"),
                        .kv_rank = n("kv_rank"),
                        .key_dim = n("key_dim"),
                        .rotary_dim = n("rotary_dim"),
                        .value_dim = n("value_dim"),
                        .index_heads = n("index_heads"),
                        .index_dim = n("index_dim"),
                        .slots = n("slots"),
                        .with_bias = n("with_bias") != 0,
                        .frequencies = frequencies};
    const auto full = std::make_shared<GlmDsaAttention>(config);
    if (n("shared") == 0) {
      return {full, [full](const at::Tensor& hidden, const LayerShare& share) {
                return full->forward(hidden, share).out;
              }};
    }
    // The layer before it, whose selection it takes over.
    full->to(at::kDouble);
    load_weights(*full, file.path(), "before.");
    config.shared = true;
    const auto layer = std::make_shared<GlmDsaAttention>(config);
    return {layer, [=](const at::Tensor& hidden, const LayerShare& share) {
              const auto first = full->forward(hidden.detach(), share);
              return layer->forward(hidden, share, first.selection).out;
            }};
  }
  if (family == "deepseek_v4") {
    return built(std::make_shared<DeepseekV4Attention>(
        DeepseekV4Config{.kind = static_cast<DeepseekV4Config::Kind>(n("kind")),
                         .hidden = n("hidden"),
                         .heads = n("heads"),
                         .head_dim = n("head_dim"),
                         .q_rank = n("q_rank"),
                         .out_groups = n("out_groups"),
                         .out_rank = n("out_rank"),
                         .window = n("window"),
                         .ratio = n("ratio"),
                         .index_heads = n("index_heads"),
                         .index_dim = n("index_dim"),
                         .slots = n("slots"),
                         .eps = words.real("eps"),
                         .rotary = {.channels = 2 * frequencies.size(0),
                                    .frequencies = frequencies,
                                    .scaling = words.real("scaling")}}));
  }
  throw std::invalid_argument("model_layers: no family '" + family + "'");
}

Packing packing_of(const Words& words) {
  std::vector<int64_t> lengths, slots;
  std::istringstream documents(words.word("documents"));
  for (std::string one; std::getline(documents, one, ',');) {
    const auto slash = one.find('/');
    lengths.push_back(std::stoll(one));
    slots.push_back(slash == std::string::npos
                        ? lengths.back()
                        : std::stoll(one.substr(slash + 1)));
  }
  return Packing::of(lengths, slots, words.number("tokens"));
}

/// "3 uneven".
Ownership ownership_of(const std::string& cut, int64_t tokens) {
  const int ranks = std::stoi(cut);
  const std::string layout = cut.substr(cut.find(' ') + 1);
  if (layout == "contiguous") return Ownership::contiguous(tokens, ranks);
  if (layout == "head-tail") return Ownership::head_tail(tokens, ranks);
  std::vector<int64_t> sizes(static_cast<std::size_t>(ranks), 3);
  sizes.back() = tokens - 3 * (ranks - 1);
  return Ownership::of_sizes(sizes);
}

/// The layer over ranks, and all gradients.
NamedTensors answer_of(const Words& words, const SafetensorsFile& file,
                       const Packing& packing, const Ownership& owners) {
  const at::Tensor hidden = file.read("hidden");
  const at::Tensor gradient = file.read("gradient");
  const auto layout = AttentionLayout::of(owners, {Mask::causal(packing)});
  at::Tensor out = at::zeros_like(hidden), back = at::zeros_like(hidden);
  NamedTensors sums;
  std::mutex writing;
  run_ranks(owners.ranks(), [&](const Group& group) {
    at::set_num_threads(1);
    Built layer = build(words, file);
    layer.module->to(hidden.scalar_type());
    load_weights(*layer.module, file.path(), "layer.");
    const at::Tensor mine = token_indices(owners, group.rank());
    const at::Tensor own = hidden.index_select(0, mine).set_requires_grad(true);
    const at::Tensor answer = layer.forward(own, LayerShare(layout, group));
    (answer * gradient.index_select(0, mine)).sum().backward();
    const std::lock_guard lock(writing);
    out.index_copy_(0, mine, answer.detach());
    back.index_copy_(0, mine, own.grad());
    const auto parameters = layer.module->named_parameters();
    if (sums.empty()) {
      for (const auto& item : parameters) {
        sums.emplace_back("layer." + item.key(),
                          at::zeros_like(item.value()).detach());
      }
    }
    for (auto& [name, sum] : sums) {
      const at::Tensor& part = parameters[name.substr(6)].grad();
      if (part.defined()) sum += part;
    }
  });
  sums.emplace_back("out", out);
  sums.emplace_back("hidden", back);
  return sums;
}

void run(const char* input, const char* output) {
  const SafetensorsFile file = SafetensorsFile::open(input);
  const Words words(file);
  const Packing packing = packing_of(words);
  NamedTensors answers;
  std::istringstream cuts(words.word("cuts"));
  int64_t number = 0;
  for (std::string cut; std::getline(cuts, cut, ','); ++number) {
    const Ownership owners = ownership_of(cut, packing.tokens());
    for (auto& [name, tensor] : answer_of(words, file, packing, owners)) {
      answers.emplace_back(std::to_string(number) + "." + name, tensor);
    }
  }
  write_safetensors(output, answers);
}

}  // namespace
}  // namespace longspan

int main(int count, char** words) {
  if (count != 3) {
    std::cerr << "usage: model_layers INPUT OUTPUT\n";
    return 2;
  }
  try {
    longspan::run(words[1], words[2]);
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
  return 0;
}
