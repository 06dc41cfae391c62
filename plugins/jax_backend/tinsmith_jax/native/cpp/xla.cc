// The kernels as XLA calls them: through the C interface of its FFI, since the headers of the one for C++ take longer
// to compile than any kernel.

#include <cstdint>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "call.h"
#include "xla/ffi/api/c_api.h"

namespace tinsmith {
namespace {

XLA_FFI_Error* error(const XLA_FFI_Api* api, XLA_FFI_Error_Code code, const char* message) {
  XLA_FFI_Error_Create_Args args{XLA_FFI_Error_Create_Args_STRUCT_SIZE, nullptr, message, code};
  return api->XLA_FFI_Error_Create(&args);
}

XLA_FFI_Error* error(const XLA_FFI_Api* api, const Refused& refused) {
  std::string told = "a kernel for CPUs was given ";
  if (refused.array >= 0) told += "array " + std::to_string(refused.array) + " with ";
  return error(api, XLA_FFI_Error_Code_INVALID_ARGUMENT, (told + refused.why).c_str());
}

void destroy(const XLA_FFI_Api* api, XLA_FFI_Error* error) {
  XLA_FFI_Error_Destroy_Args args{XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, nullptr, error};
  api->XLA_FFI_Error_Destroy(&args);
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

std::vector<Array> arrays(void** buffers, int64_t count) {
  std::vector<Array> all;
  for (int64_t i = 0; i < count; ++i) {
    const auto* buffer = static_cast<const XLA_FFI_Buffer*>(buffers[i]);
    all.push_back({{buffer->data, {buffer->dims, buffer->rank}}, type_of(buffer->dtype)});
  }
  return all;
}

template <typename T>
void read(const XLA_FFI_Attrs& attributes, const char* name, T* to) {
  for (int64_t i = 0; i < attributes.size; ++i) {
    const XLA_FFI_ByteSpan* found = attributes.names[i];
    if (std::string(found->ptr, found->len) != name) continue;
    if (attributes.types[i] != XLA_FFI_AttrType_SCALAR) throw Refused{"an attribute that is no scalar"};
    std::memcpy(to, static_cast<const XLA_FFI_Scalar*>(attributes.attrs[i])->value, sizeof(T));
  }
}

// Without a pool, the calling thread does everything.
Threads threads(XLA_FFI_CallFrame* frame) {
  int64_t count = 1;
  XLA_FFI_ThreadPool_NumThreads_Args args{XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, nullptr, frame->ctx, &count};
  if (XLA_FFI_Error* error = frame->api->XLA_FFI_ThreadPool_NumThreads(&args)) destroy(frame->api, error);
  const auto schedule = [](void* pool, void (*work)(void*), void* argument) {
    const auto* frame = static_cast<const XLA_FFI_CallFrame*>(pool);
    XLA_FFI_ThreadPool_Schedule_Args args{XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE, nullptr, frame->ctx, work,
                                          argument};
    XLA_FFI_Error* error = frame->api->XLA_FFI_ThreadPool_Schedule(&args);
    if (error != nullptr) destroy(frame->api, error);
    return error == nullptr;
  };
  return {count, frame, schedule};
}

// Runs a kernel, and tells XLA if memory is short, as XLA's own operations do.
XLA_FFI_Error* run(Kernel* kernel, XLA_FFI_CallFrame* frame) {
  const auto* extension = frame->extension_start;
  if (extension != nullptr && extension->type == XLA_FFI_Extension_Metadata) {
    describe(reinterpret_cast<const XLA_FFI_Metadata_Extension*>(extension)->metadata);
    return nullptr;
  }
  try {
    const std::vector<Array> arguments = arrays(frame->args.args, frame->args.size);
    const std::vector<Array> results = arrays(frame->rets.rets, frame->rets.size);
    Call call{threads(frame), {arguments.data(), frame->args.size}, {results.data(), frame->rets.size}};
    read(frame->attrs, "eps", &call.eps);
    read(frame->attrs, "gives_logits", &call.gives_logits);
    read(frame->attrs, "rounds", &call.rounds);
    read(frame->attrs, "recurs", &call.recurs);
    read(frame->attrs, "adapters", &call.adapters);
    kernel(call);
    if (call.arguments.left() + call.results.left() > 0) {
      throw Refused{"too many arrays"};
    }
    return nullptr;
  } catch (const std::bad_alloc&) {
    return error(frame->api, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "out of memory in a kernel for CPUs");
  } catch (const Refused& refused) {
    return error(frame->api, refused);
  }
}

}  // namespace
}  // namespace tinsmith

#define TINSMITH_TARGET(name, kernel) \
  extern "C" XLA_FFI_Error* name(XLA_FFI_CallFrame* frame) { return tinsmith::run(tinsmith::kernel, frame); }

TINSMITH_TARGET(tinsmith_untouched, untouched)
TINSMITH_TARGET(tinsmith_layers, sampling_layers)
TINSMITH_TARGET(tinsmith_draw, draw)
TINSMITH_TARGET(tinsmith_forward, training_forward)
TINSMITH_TARGET(tinsmith_backward, training_backward)
TINSMITH_TARGET(tinsmith_head_forward, head_forward)
TINSMITH_TARGET(tinsmith_head_backward, head_backward)
TINSMITH_TARGET(tinsmith_step, adamw_step)
