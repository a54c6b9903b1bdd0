// Entry points of the backend: reads requests of Triton, and gives them to the front.

#include <chrono>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "front.h"
#include "text.h"
#include "triton.h"

namespace token2wav {
namespace {

const char* const SOCKET_VARIABLE = "TOKEN2WAV_ENGINE";
constexpr std::chrono::seconds PATIENCE(600);
constexpr uint32_t SEQUENCE_FLAGS = 3;  // start and end
constexpr size_t LONGEST_ID = 65535;
constexpr uint32_t MOST_INPUTS = 255;

// The engine accepts one front, so there is one in the process.
std::atomic<bool> has_front{false};

Refusal invalid(const std::string& text) {
    return Refusal(TRITONSERVER_ERROR_INVALID_ARG, text);
}

SequenceId read_sequence_id(TRITONBACKEND_Request* request) {
    SequenceId id;
    const char* text = "";
    // Triton has no other sign of a number than the failure of this function.
    if (auto* error = TRITONBACKEND_RequestCorrelationIdString(request, &text)) {
        TRITONSERVER_ErrorDelete(error);
        check(TRITONBACKEND_RequestCorrelationId(request, &id.number));
        return id;
    }
    id.text = text;
    // The engine would end the connection, which would end the utterances of all others.
    if (!is_utf8(*id.text)) throw invalid("request: its sequence id is not UTF-8");
    if (id.text->size() > LONGEST_ID) throw invalid("request: its sequence id is too long");
    return id;
}

std::string read_parameters(TRITONBACKEND_Request* request) {
    JsonObject parameters;
    uint32_t count;
    check(TRITONBACKEND_RequestParameterCount(request, &count));
    for (uint32_t index = 0; index < count; index++) {
        const char* name;
        TRITONSERVER_ParameterType type;
        const void* value;
        check(TRITONBACKEND_RequestParameter(request, index, &name, &type, &value));
        switch (type) {
            case TRITONSERVER_PARAMETER_STRING:
                parameters.add_text(name, static_cast<const char*>(value));
                break;
            case TRITONSERVER_PARAMETER_INT:
                parameters.add_integer(name, *static_cast<const int64_t*>(value));
                break;
            case TRITONSERVER_PARAMETER_BOOL:
                parameters.add_boolean(name, *static_cast<const bool*>(value));
                break;
            case TRITONSERVER_PARAMETER_DOUBLE:
                parameters.add_double(name, *static_cast<const double*>(value));
                break;
            default:
                throw invalid("request: parameters must be texts, numbers or booleans");
        }
    }
    return parameters.text();
}

Tensor read_input(TRITONBACKEND_Request* request, uint32_t index) {
    TRITONBACKEND_Input* input;
    check(TRITONBACKEND_RequestInputByIndex(request, index, &input));
    const char* name;
    TRITONSERVER_DataType datatype;
    const int64_t* shape;
    uint32_t dimensions;
    uint64_t bytes;
    uint32_t buffers;
    check(TRITONBACKEND_InputProperties(
        input, &name, &datatype, &shape, &dimensions, &bytes, &buffers));
    // The model's configuration allows only short names and few dimensions.
    Tensor tensor{name, static_cast<uint8_t>(datatype), {shape, shape + dimensions}, {}};
    uint64_t received = 0;
    for (uint32_t part = 0; part < buffers; part++) {
        const void* data;
        uint64_t size;
        TRITONSERVER_MemoryType memory = TRITONSERVER_MEMORY_CPU;
        int64_t device = 0;
        check(TRITONBACKEND_InputBuffer(input, part, &data, &size, &memory, &device));
        if (size == 0) continue;
        if (memory == TRITONSERVER_MEMORY_GPU) {
            throw invalid(std::string(name) + ": it must be in memory of the CPU");
        }
        tensor.buffers.emplace_back(static_cast<const char*>(data), size);
        received += size;
    }
    if (tensor_bytes(tensor.datatype, tensor.shape) != received) {
        throw invalid(std::string(name) + ": its size is not that of its type and shape");
    }
    return tensor;
}

// Reads a request. The result refers to the memory of the request.
Request read_request(TRITONBACKEND_Request* triton_request, uint64_t slot) {
    Request request{slot, 0, read_sequence_id(triton_request), read_parameters(triton_request), {}};
    uint32_t flags;
    check(TRITONBACKEND_RequestFlags(triton_request, &flags));
    request.flags = flags & SEQUENCE_FLAGS;
    uint32_t inputs;
    check(TRITONBACKEND_RequestInputCount(triton_request, &inputs));
    if (inputs > MOST_INPUTS) throw invalid("request: it has too many inputs");
    for (uint32_t index = 0; index < inputs; index++) {
        request.inputs.push_back(read_input(triton_request, index));
    }
    return request;
}

uint64_t now_ns() {
    return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                     std::chrono::steady_clock::now().time_since_epoch())
                                     .count());
}

// Copies and releases a request, and then forwards or refuses it. After the release, Triton may free
// its memory.
void forward(Front& front, TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request* request) {
    Reply reply(request);
    Outgoing copied;
    std::optional<Refusal> refused;
    auto attempt = [&refused](const auto& work) {
        try {
            work();
        } catch (const Refusal& refusal) {
            refused = refusal;
        } catch (const std::exception& error) {
            refused = Refusal(TRITONSERVER_ERROR_INTERNAL, error.what());
        }
    };
    uint64_t start = now_ns();
    attempt([&] { copied = outgoing_request(read_request(request, front.new_slot())); });
    uint64_t end = now_ns();
    // Triton counts a request as done once it has been copied.
    log_error(TRITONBACKEND_ModelInstanceReportStatistics(
        instance, request, !refused, start, start, end, end));
    log_error(TRITONBACKEND_RequestRelease(request, TRITONSERVER_REQUEST_RELEASE_ALL));
    if (!refused) attempt([&] { front.submit(copied, reply); });
    if (refused) reply.fail(refused->code, refused->what());
}

TRITONSERVER_Error* error_of(const Refusal& refusal) {
    return TRITONSERVER_ErrorNew(refusal.code, refusal.what());
}

Front* front_of(TRITONBACKEND_ModelInstance* instance) {
    void* state = nullptr;
    check(TRITONBACKEND_ModelInstanceState(instance, &state));
    return static_cast<Front*>(state);
}

}  // namespace
}  // namespace token2wav

using namespace token2wav;

TRITONSERVER_Error* TRITONBACKEND_Initialize(TRITONBACKEND_Backend*) {
    uint32_t major, minor;
    if (auto* error = TRITONBACKEND_ApiVersion(&major, &minor)) return error;
    if (major == TRITON_API_MAJOR_VERSION) return nullptr;
    std::string text = "backend token2wav: it needs version " +
                       std::to_string(TRITON_API_MAJOR_VERSION) +
                       " of Triton's interface for backends; this server has version " +
                       std::to_string(major);
    return TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_UNSUPPORTED, text.c_str());
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceInitialize(TRITONBACKEND_ModelInstance* instance) {
    const char* socket_path = std::getenv(SOCKET_VARIABLE);
    if (socket_path == nullptr) {
        std::string text = std::string("engine: ") + SOCKET_VARIABLE + " does not name its socket";
        return TRITONSERVER_ErrorNew(TRITONSERVER_ERROR_INVALID_ARG, text.c_str());
    }
    if (has_front.exchange(true)) {
        return TRITONSERVER_ErrorNew(
            TRITONSERVER_ERROR_INVALID_ARG,
            "instance_group: the model has one instance; set its count to 1, and unload the model "
            "before it is loaded again");
    }
    try {
        auto front = std::make_unique<Front>(socket_path);
        front->wait_until_ready(PATIENCE);
        check(TRITONBACKEND_ModelInstanceSetState(instance, front.get()));
        front.release();
        return nullptr;
    } catch (const Refusal& refusal) {
        has_front = false;
        return error_of(refusal);
    }
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceFinalize(TRITONBACKEND_ModelInstance* instance) {
    try {
        if (Front* front = front_of(instance)) {
            delete front;
            has_front = false;
        }
        return nullptr;
    } catch (const Refusal& refusal) {
        return error_of(refusal);
    }
}

TRITONSERVER_Error* TRITONBACKEND_ModelInstanceExecute(
    TRITONBACKEND_ModelInstance* instance, TRITONBACKEND_Request** requests, uint32_t count) {
    try {
        Front* front = front_of(instance);
        for (uint32_t index = 0; index < count; index++) forward(*front, instance, requests[index]);
    } catch (const Refusal& refusal) {
        // Triton answers all requests if it gets an error, and some of them may have their answer.
        log(TRITONSERVER_LOG_ERROR, refusal.what());
    }
    return nullptr;
}
