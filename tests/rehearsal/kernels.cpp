// CPU kernels for tensors on the rehearsed cards, whose memory is host memory.
//
// For each aten operator with a CUDA and a CPU kernel, a boxed function is registered for CUDA: it
// gives the CPU kernel the same bytes as CPU tensors, and copies what comes out into tensors of
// CUDA's allocator. Views, allocations, and copies between devices stay torch's own. Memory that a
// CUDA kernel would take inside is not taken.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <cstring>
#include <memory>
#include <set>
#include <sstream>
#include <string>

namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::IValue;

const char* OWN =  // torch's own code runs these: they make, view or move tensors
    "empty empty_strided empty_like new_empty as_strided set_ set resize_ resize view _reshape_alias unfold "
    "record_stream is_pinned _pin_memory _local_scalar_dense _fused_sdp_choice _copy_from _copy_from_and_resize "
    "_has_compatible_shallow_copy_type is_set_to _cudnn_init_dropout_state _to_copy clone contiguous "
    "_efficientzerotensor _resize_output_ lift lift_fresh detach alias full zeros ones "
    "_nested_tensor_from_mask empty_permuted resize_as_ data_ptr";
const char* ALSO =  // without a CUDA kernel of their own name
    "copy_ convolution convolution_backward native_layer_norm native_layer_norm_backward";

std::set<std::string> words(const char* text) {
  std::stringstream stream(text);
  return {std::istream_iterator<std::string>(stream), {}};
}

bool is_random(const c10::OperatorHandle& op) {
  for (auto& tag : op.getTags())
    if (tag == at::Tag::nondeterministic_seeded) return true;
  return false;
}

// While it lives, the CPU's generator has a state that follows from the card's seed and offset, and
// the card's offset moves on, as CUDA's does.
struct Seeded {
  at::Generator cpu = at::globalContext().defaultGenerator(at::kCPU);
  Tensor before;
  explicit Seeded(at::Generator card) {
    std::lock_guard<std::mutex> guard(card.mutex());
    uint64_t offset = card.get_offset();
    card.set_offset(offset + 4);
    std::lock_guard<std::mutex> own(cpu.mutex());
    before = cpu.get_state();
    cpu.set_current_seed(card.current_seed() * 6364136223846793005ULL + offset * 1442695040888963407ULL);
  }
  ~Seeded() {
    std::lock_guard<std::mutex> own(cpu.mutex());
    cpu.set_state(before);
  }
};

// Tensors of a call and their aliases on the CPU, in both directions.
struct Call {
  std::vector<std::pair<Tensor, Tensor>> known;
  std::optional<c10::Device> card;
  at::Generator generator;

  Tensor alias(const Tensor& t) {
    if (!t.defined() || !t.is_cuda()) return t;
    for (auto& [device, host] : known)
      if (device.is_same(t)) return host;
    if (!card) card = t.device();
    auto options = t.options().device(at::kCPU).requires_grad(false);
    Tensor host = t.numel() > 0 ? at::from_blob(t.mutable_data_ptr(), t.sizes(), t.strides(), [](void*) {}, options)
                                : at::empty_strided(t.sizes(), t.strides(), options);
    if (t.is_conj()) host._set_conj(true);
    if (t.is_neg()) host._set_neg(true);
    known.emplace_back(t, host);
    return host;
  }

  Tensor back(const Tensor& host) {
    if (!host.defined() || !host.device().is_cpu()) return host;
    for (auto& [device, alias] : known)
      if (alias.is_same(host)) return device;
    Tensor source = host.is_non_overlapping_and_dense() ? host : host.contiguous();
    Tensor out = at::empty_strided(source.sizes(), source.strides(), source.options().device(*card));
    if (source.numel() > 0) std::memcpy(out.mutable_data_ptr(), source.const_data_ptr(), source.nbytes());
    return out;
  }

  void to_host(IValue& value) {
    if (value.isTensor()) {
      value = alias(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : value.toTensorVector()) list.push_back(alias(t));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& t : value.toOptionalTensorList())
        list.push_back(t ? std::optional<Tensor>(alias(*t)) : t);
      value = list;
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      card = value.toDevice();
      value = c10::Device(at::kCPU);
    } else if (value.isGenerator() && value.toGenerator().device().is_cuda()) {
      generator = value.toGenerator();
      value = IValue();
    }
  }

  void to_card(IValue& value) {
    if (value.isTensor()) {
      value = back(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : value.toTensorVector()) list.push_back(back(t));
      value = list;
    }
  }

  // An output that was resized has other bytes.
  void follow() {
    for (auto& [device, host] : known) {
      bool same = host.sizes() == device.sizes() && (host.numel() == 0 || host.const_data_ptr() == device.const_data_ptr());
      if (same) continue;
      device.resize_(host.sizes());
      Tensor plain = host.contiguous();
      Tensor moved = at::empty_strided(plain.sizes(), plain.strides(), device.options());
      if (plain.numel() > 0) std::memcpy(moved.mutable_data_ptr(), plain.const_data_ptr(), plain.nbytes());
      device.copy_(moved);
    }
  }
};

void on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  size_t count = op.schema().arguments().size(), begin = stack->size() - count;
  Call call;
  for (size_t i = begin; i < stack->size(); i++) call.to_host((*stack)[i]);
  if (!call.card) call.card = c10::Device(at::kCUDA, 0);
  std::unique_ptr<Seeded> seeded;
  if (is_random(op))
    seeded = std::make_unique<Seeded>(call.generator.defined() ? call.generator : at::globalContext().defaultGenerator(*call.card));
  op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), stack);
  call.follow();
  size_t results = op.schema().returns().size();
  for (size_t i = stack->size() - results; i < stack->size(); i++) call.to_card((*stack)[i]);
}

// Between devices torch's own code copies, with the buffers that it needs for another type or
// layout: it is the same function for all devices.
void copy(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  size_t begin = stack->size() - op.schema().arguments().size();
  if ((*stack)[begin].toTensor().device() == (*stack)[begin + 1].toTensor().device())
    on_cpu(op, keys, stack);
  else
    op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), stack);
}

bool is_view(const c10::OperatorHandle& op) {
  for (auto& result : op.schema().returns())
    if (result.alias_info() && !result.alias_info()->isWrite()) return true;
  return false;
}

bool has_cpu(const c10::OperatorHandle& op) {
  for (auto key : {DispatchKey::CPU, DispatchKey::CompositeExplicitAutograd, DispatchKey::CompositeExplicitAutogradNonFunctional})
    if (op.hasKernelForDispatchKey(key)) return true;
  return false;
}

}  // namespace

// Registers the kernels until the process ends; returns their number.
extern "C" int rehearsal_install() {
  static torch::Library library(torch::Library::IMPL, "aten", DispatchKey::CUDA, __FILE__, __LINE__);
  auto own = words(OWN), also = words(ALSO);
  int count = 0;
  for (auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    auto op = c10::Dispatcher::singleton().findSchema(name);
    std::string base = name.name.substr(6), full = base + (name.overload_name.empty() ? "" : "." + name.overload_name);
    if (!op || own.count(base) || own.count(full) || is_view(*op)) continue;
    bool both = op->hasKernelForDispatchKey(DispatchKey::CUDA) && has_cpu(*op);
    if (!both && !also.count(base)) continue;
    library.impl(full.c_str(), base == "copy_" ? torch::CppFunction::makeFromBoxedFunction<&copy>()
                                               : torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
    count++;
  }
  return count;
}
