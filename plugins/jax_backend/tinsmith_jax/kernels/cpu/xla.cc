// The kernels as XLA calls them: through the C interface of its FFI, since the headers of the one for C++ take longer
// to compile than any kernel.

#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "call.h"
#include "xla/ffi/api/c_api.h"

namespace tinsmith {
namespace {

XLA_FFI_Error* error(const XLA_FFI_Api* api, XLA_FFI_Error_Code code, const char* message) {
  XLA_FFI_Error_Create_Args args{XLA_FFI_Error_Create_Args_STRUCT_SIZE, nullptr, message, code};
  return api->XLA_FFI_Error_Create(&args);
}

void throw_if(const XLA_FFI_Api* api, XLA_FFI_Error* error) {
  if (error == nullptr) return;
  XLA_FFI_Error_GetMessage_Args told{XLA_FFI_Error_GetMessage_Args_STRUCT_SIZE, nullptr, error, nullptr};
  api->XLA_FFI_Error_GetMessage(&told);
  const std::string message = told.message;
  XLA_FFI_Error_Destroy_Args args{XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, nullptr, error};
  api->XLA_FFI_Error_Destroy(&args);
  throw std::runtime_error(message);
}

// Answers XLA when it asks, at the registration, for which version of its interface this was compiled.
void describe(XLA_FFI_Metadata* metadata) {
  const size_t size = metadata->struct_size;
  std::memset(metadata, 0, sizeof(*metadata));
  metadata->struct_size = size;
  metadata->api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
}

Type type_of(XLA_FFI_DataType type) {
  switch (type) {
    case XLA_FFI_DataType_F32:
      return Type::kFloat32;
    case XLA_FFI_DataType_BF16:
      return Type::kBFloat16;
    case XLA_FFI_DataType_S32:
      return Type::kInt32;
    default:
      return Type::kOther;
  }
}

Arrays arrays(void** buffers, int64_t count) {
  std::vector<Array> all;
  for (int64_t i = 0; i < count; ++i) {
    const auto* buffer = static_cast<const XLA_FFI_Buffer*>(buffers[i]);
    all.push_back({{buffer->data, {buffer->dims, buffer->rank}}, type_of(buffer->dtype)});
  }
  return Arrays(std::move(all));
}

template <typename T>
void read(const XLA_FFI_Attrs& attributes, const char* name, T* to) {
  for (int64_t i = 0; i < attributes.size; ++i) {
    const XLA_FFI_ByteSpan* found = attributes.names[i];
    if (std::string(found->ptr, found->len) != name) continue;
    if (attributes.types[i] != XLA_FFI_AttrType_SCALAR) throw std::invalid_argument("an attribute is no scalar");
    std::memcpy(to, static_cast<const XLA_FFI_Scalar*>(attributes.attrs[i])->value, sizeof(T));
  }
}

Threads threads(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* context) {
  int64_t count = 0;
  XLA_FFI_ThreadPool_NumThreads_Args args{XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, nullptr, context, &count};
  throw_if(api, api->XLA_FFI_ThreadPool_NumThreads(&args));
  const auto schedule = [=](std::function<void()> work) {
    auto kept = std::make_unique<std::function<void()>>(std::move(work));
    const auto run = [](void* given) {
      auto* work = static_cast<std::function<void()>*>(given);
      (*work)();
      delete work;
    };
    XLA_FFI_ThreadPool_Schedule_Args args{XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE, nullptr, context, run,
                                          kept.get()};
    throw_if(api, api->XLA_FFI_ThreadPool_Schedule(&args));
    kept.release();  // `run` deletes it
  };
  return {count, schedule};
}

// Runs a kernel, and tells XLA if memory is short, as XLA's own operations do.
XLA_FFI_Error* run(Kernel* kernel, XLA_FFI_CallFrame* frame) {
  const auto* extension = frame->extension_start;
  if (extension != nullptr && extension->type == XLA_FFI_Extension_Metadata) {
    describe(reinterpret_cast<const XLA_FFI_Metadata_Extension*>(extension)->metadata);
    return nullptr;
  }
  try {
    Call call{threads(frame->api, frame->ctx), arrays(frame->args.args, frame->args.size),
              arrays(frame->rets.rets, frame->rets.size)};
    read(frame->attrs, "eps", &call.eps);
    read(frame->attrs, "gives_logits", &call.gives_logits);
    read(frame->attrs, "adapters", &call.adapters);
    kernel(call);
    if (call.arguments.left() + call.results.left() > 0) {
      throw std::invalid_argument("a kernel for CPUs was given too many arrays");
    }
    return nullptr;
  } catch (const std::bad_alloc&) {
    return error(frame->api, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "out of memory in a kernel for CPUs");
  } catch (const std::exception& exception) {
    return error(frame->api, XLA_FFI_Error_Code_INVALID_ARGUMENT, exception.what());
  }
}

}  // namespace
}  // namespace tinsmith

#define TINSMITH_TARGET(name, kernel) \
  extern "C" XLA_FFI_Error* name(XLA_FFI_CallFrame* frame) { return tinsmith::run(tinsmith::kernel, frame); }

TINSMITH_TARGET(tinsmith_layers, sampling_layers)
TINSMITH_TARGET(tinsmith_draw, draw)
TINSMITH_TARGET(tinsmith_forward, training_forward)
TINSMITH_TARGET(tinsmith_backward, training_backward)
TINSMITH_TARGET(tinsmith_head_forward, head_forward)
TINSMITH_TARGET(tinsmith_head_backward, head_backward)
TINSMITH_TARGET(tinsmith_step, adamw_step)
