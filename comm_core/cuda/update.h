// The optimizer's update of one shard: SGD and Adam, in float, with parameters and gradients of any type.
#pragma once

#include "copy.h"

namespace commsched {

// One parameter group's numbers of this step; comm_core/cuda/update.py fills these in, in double precision.
struct Hyper {
  float lr;
  float weight_decay;
  float momentum;       // SGD; Adam: beta1
  float one_minus_first;  // SGD: 1 - dampening (1 in the first step); Adam: 1 - beta1
  float second;         // Adam: beta2
  float one_minus_second;
  float eps;
  float root_of_bias;  // Adam: square root of the second bias correction, from the part's count
  float shrink;        // what decoupled weight decay leaves of the weights: 1 - lr * weight_decay, else 1
  float sign;          // -1 to maximize
  float nesterov;      // 0 or 1
  float unused;
  double first_beta, second_beta;  // Adam: for the bias corrections, which a float would spoil
};
static_assert(sizeof(Hyper) == 64, "a row of the table in comm_core/cuda/update.py");

// A parameter's part in this shard, as addresses. `master` is 0 where the weights are the parameter itself.
struct Part {
  const void* grad;
  void* weight;
  float* master;
  float* first;   // momentum; Adam: the mean of the gradients
  float* second;  // Adam: the mean of their squares
  const float* steps;  // Adam: how many steps the state has seen, this one included
  Int64 group;
};

struct Sgd {
  static constexpr bool kSecond = false;

  static COMMSCHED_HD void begin(Hyper&, const Part&) {}

  static COMMSCHED_HD float step(float w, float g, float& first, float&, const Hyper& h, bool has_first) {
    g = g * h.sign + h.weight_decay * w;
    if (has_first) {
      first = h.momentum * first + h.one_minus_first * g;
      g = h.nesterov != 0.0f ? g + h.momentum * first : first;
    }
    return w - h.lr * g;
  }
};

struct Adam {
  static constexpr bool kSecond = true;

  // The count is on the device: the host does not know which steps were skipped there.
  static COMMSCHED_HD void begin(Hyper& h, const Part& part) {
    const Int64 count = static_cast<Int64>(*part.steps);
    h.lr = static_cast<float>(h.lr / (1.0 - power(h.first_beta, count)));
    h.root_of_bias = root(static_cast<float>(1.0 - power(h.second_beta, count)));
  }

  static COMMSCHED_HD float step(float w, float g, float& first, float& second, const Hyper& h, bool) {
    w *= h.shrink;
    g = g * h.sign + h.weight_decay * w;
    first += h.one_minus_first * (g - first);
    second = h.second * second + h.one_minus_second * g * g;
    return w - h.lr * (first / (root(second) / h.root_of_bias + h.eps));
  }
};

// What one thread holds of `kWidth` neighbouring elements.
template <typename Rule, typename Grad, typename Weight, int kWidth>
struct Row {
  Vector<Grad, kWidth> grad;
  Vector<Weight, kWidth> weight;
  Vector<float, kWidth> master, first, second;

  COMMSCHED_HD void load(const Part& part, Int64 i) {
    grad = load_vector<Grad, kWidth>(static_cast<const Grad*>(part.grad) + i);
    weight = load_vector<Weight, kWidth>(static_cast<const Weight*>(part.weight) + i);
    if (part.master != nullptr) master = load_vector<float, kWidth>(part.master + i);
    if (part.first != nullptr) first = load_vector<float, kWidth>(part.first + i);
    if (Rule::kSecond) second = load_vector<float, kWidth>(part.second + i);
  }

  // The master, unless somebody has written another weight since it was rounded to one.
  static COMMSCHED_HD float valid(float master, Weight weight) {
    Weight rounded;
    store_value(&rounded, master);
    return load_value(rounded) == load_value(weight) ? master : load_value(weight);
  }

  COMMSCHED_HD void step(const Part& part, float factor, const Hyper& hyper) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      const float old = part.master != nullptr ? valid(master.at[k], weight.at[k]) : load_value(weight.at[k]);
      const float updated = Rule::step(old, load_value(grad.at[k]) * factor, first.at[k], second.at[k], hyper,
                                       part.first != nullptr);
      master.at[k] = updated;
      store_value(weight.at + k, updated);
    }
  }

  COMMSCHED_HD void store(const Part& part, Int64 i) const {
    store_vector<Weight, kWidth>(static_cast<Weight*>(part.weight) + i, weight);
    if (part.master != nullptr) store_vector<float, kWidth>(part.master + i, master);
    if (part.first != nullptr) store_vector<float, kWidth>(part.first + i, first);
    if (Rule::kSecond) store_vector<float, kWidth>(part.second + i, second);
  }
};

template <typename Grad, typename Weight, int kWidth>
COMMSCHED_HD bool all_aligned(const Part& part, Int64 i) {
  return is_aligned<Grad, kWidth>(static_cast<const Grad*>(part.grad) + i) &&
         is_aligned<Weight, kWidth>(static_cast<const Weight*>(part.weight) + i) &&
         is_aligned<float, kWidth>(part.master + i) && is_aligned<float, kWidth>(part.first + i) &&
         is_aligned<float, kWidth>(part.second + i);
}

template <typename Rule, typename Grad, typename Weight, int kWidth>
COMMSCHED_HD void update_rows(const Part& part, Int64 begin, Int64 end, float factor, const Hyper& hyper, int thread,
                              int threads) {
  for (Int64 i = begin + static_cast<Int64>(thread) * kWidth; i < end; i += static_cast<Int64>(threads) * kWidth) {
    Row<Rule, Grad, Weight, kWidth> row = {};
    row.load(part, i);
    row.step(part, factor, hyper);
    row.store(part, i);
  }
}

// One thread's part of one chunk. Gradients are multiplied by `factor` first (unscaling, clipping).
template <typename Rule, typename Grad, typename Weight>
COMMSCHED_HD void update_chunk(const Chunk& chunk, const Part* parts, const Hyper* hypers, float factor, int thread,
                               int threads) {
  constexpr int kWidth = 4;  // 16 bytes of float: the state is most of what moves
  const Part part = parts[chunk.tensor];
  Hyper hyper = hypers[part.group];
  Rule::begin(hyper, part);
  const Int64 begin = chunk.offset, end = begin + chunk.count;
  const Int64 to_whole = (kWidth - begin % kWidth) % kWidth;  // up to an index that is a multiple of the width
  const Int64 head = to_whole < chunk.count ? to_whole : chunk.count;
  Int64 done = begin;
  if (all_aligned<Grad, Weight, kWidth>(part, begin + head)) {
    update_rows<Rule, Grad, Weight, 1>(part, begin, begin + head, factor, hyper, thread, threads);
    done = end - (chunk.count - head) % kWidth;
    update_rows<Rule, Grad, Weight, kWidth>(part, begin + head, done, factor, hyper, thread, threads);
  }
  update_rows<Rule, Grad, Weight, 1>(part, done, end, factor, hyper, thread, threads);
}

}  // namespace commsched
