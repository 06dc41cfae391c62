// The kernels as XLA calls them.

#include <new>
#include <stdexcept>
#include <utility>
#include <vector>

#include "call.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace tinsmith {
namespace {

Type type_of(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F32:
      return Type::kFloat32;
    case ffi::DataType::BF16:
      return Type::kBFloat16;
    case ffi::DataType::S32:
      return Type::kInt32;
    default:
      return Type::kOther;
  }
}

Array array(const ffi::AnyBuffer& buffer) {
  const auto dims = buffer.dimensions();
  return {{buffer.untyped_data(), {dims.begin(), static_cast<int64_t>(dims.size())}}, type_of(buffer.element_type())};
}
Array array(ffi::Result<ffi::AnyBuffer> result) { return array(*result); }

template <typename Buffers>
Arrays arrays(const Buffers& buffers) {
  std::vector<Array> all;
  for (size_t index = 0; index < buffers.size(); ++index) {
    all.push_back(array(buffers.template get<ffi::AnyBuffer>(index).value()));
  }
  return Arrays(std::move(all));
}

// Runs a kernel, and tells XLA if memory is short, as XLA's own operations do.
template <Kernel* kernel>
ffi::Error run(ffi::ThreadPool pool, ffi::Dictionary attributes, ffi::RemainingArgs arguments,
               ffi::RemainingRets results) {
  try {
    Call call{{pool.num_threads(), [&](std::function<void()> work) { pool.Schedule(std::move(work)); }},
              arrays(arguments),
              arrays(results)};
    if (attributes.contains("eps")) call.eps = attributes.get<float>("eps").value();
    if (attributes.contains("gives_logits")) call.gives_logits = attributes.get<bool>("gives_logits").value();
    kernel(call);
    if (call.arguments.left() + call.results.left() > 0) {
      throw std::invalid_argument("a kernel for CPUs was given too many arrays");
    }
    return ffi::Error::Success();
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "out of memory in a kernel for CPUs");
  } catch (const std::invalid_argument& error) {
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, error.what());
  }
}

auto bound() { return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Attrs().RemainingArgs().RemainingRets(); }

}  // namespace
}  // namespace tinsmith

XLA_FFI_DEFINE_HANDLER_SYMBOL(tinsmith_layers, tinsmith::run<tinsmith::sampling_layers>, tinsmith::bound());
XLA_FFI_DEFINE_HANDLER_SYMBOL(tinsmith_draw, tinsmith::run<tinsmith::draw>, tinsmith::bound());
XLA_FFI_DEFINE_HANDLER_SYMBOL(tinsmith_forward, tinsmith::run<tinsmith::training_forward>, tinsmith::bound());
XLA_FFI_DEFINE_HANDLER_SYMBOL(tinsmith_backward, tinsmith::run<tinsmith::training_backward>, tinsmith::bound());
XLA_FFI_DEFINE_HANDLER_SYMBOL(tinsmith_head_forward, tinsmith::run<tinsmith::head_forward>, tinsmith::bound());
XLA_FFI_DEFINE_HANDLER_SYMBOL(tinsmith_head_backward, tinsmith::run<tinsmith::head_backward>, tinsmith::bound());
