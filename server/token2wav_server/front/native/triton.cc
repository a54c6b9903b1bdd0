#include "triton.h"

#include <cstring>
#include <utility>

namespace token2wav {
namespace {

void add_output(TRITONBACKEND_Response* response, const Tensor& tensor) {
    std::string name(tensor.name);
    std::string_view data = tensor.buffers.front();
    TRITONBACKEND_Output* output;
    check(TRITONBACKEND_ResponseOutput(
        response, &output, name.c_str(), static_cast<TRITONSERVER_DataType>(tensor.datatype),
        tensor.shape.data(), static_cast<uint32_t>(tensor.shape.size())));
    void* buffer = nullptr;
    TRITONSERVER_MemoryType memory = TRITONSERVER_MEMORY_CPU;
    int64_t device = 0;
    check(TRITONBACKEND_OutputBuffer(output, &buffer, data.size(), &memory, &device));
    // A client can ask for its outputs in shared memory of a GPU.
    if (memory == TRITONSERVER_MEMORY_GPU) {
        throw Refusal(
            TRITONSERVER_ERROR_INVALID_ARG, name + ": it can only be written to memory of the CPU");
    }
    if (!data.empty()) std::memcpy(buffer, data.data(), data.size());
}

}  // namespace

void check(TRITONSERVER_Error* error) {
    if (error == nullptr) return;
    Refusal refusal(TRITONSERVER_ERROR_INTERNAL, TRITONSERVER_ErrorMessage(error));
    TRITONSERVER_ErrorDelete(error);
    throw refusal;
}

void log_error(TRITONSERVER_Error* error) {
    if (error == nullptr) return;
    log(TRITONSERVER_LOG_ERROR, TRITONSERVER_ErrorMessage(error));
    TRITONSERVER_ErrorDelete(error);
}

void log(TRITONSERVER_LogLevel level, const std::string& text, int line) {
    TRITONSERVER_Error* error =
        TRITONSERVER_LogMessage(level, "token2wav_front", line, text.c_str());
    if (error != nullptr) TRITONSERVER_ErrorDelete(error);
}

Reply::Reply(TRITONBACKEND_Request* request) {
    check(TRITONBACKEND_ResponseFactoryNew(&factory_, request));
}

Reply::Reply(Reply&& other) noexcept : factory_(std::exchange(other.factory_, nullptr)) {}

Reply::~Reply() {
    if (factory_ != nullptr) log_error(TRITONBACKEND_ResponseFactoryDelete(factory_));
}

bool Reply::is_cancelled() const {
    bool cancelled = false;
    log_error(TRITONBACKEND_ResponseFactoryIsCancelled(factory_, &cancelled));
    return cancelled;
}

bool Reply::send(const std::vector<Tensor>& outputs) {
    TRITONBACKEND_Response* response = nullptr;
    try {
        check(TRITONBACKEND_ResponseNewFromFactory(&response, factory_));
        for (const Tensor& tensor : outputs) add_output(response, tensor);
    } catch (const Refusal& refusal) {
        fail(response, refusal.code, refusal.what());
        return false;
    }
    log_error(TRITONBACKEND_ResponseSend(response, 0, nullptr));
    return true;
}

void Reply::finish() {
    log_error(
        TRITONBACKEND_ResponseFactorySendFlags(factory_, TRITONSERVER_RESPONSE_COMPLETE_FINAL));
    log_error(TRITONBACKEND_ResponseFactoryDelete(std::exchange(factory_, nullptr)));
}

void Reply::fail(TRITONSERVER_Error_Code code, const std::string& text) {
    TRITONBACKEND_Response* response = nullptr;
    log_error(TRITONBACKEND_ResponseNewFromFactory(&response, factory_));
    fail(response, code, text.c_str());
}

// Triton waits for every response that was begun. So one that cannot be sent becomes the error.
void Reply::fail(
    TRITONBACKEND_Response* response, TRITONSERVER_Error_Code code, const char* text) {
    if (response == nullptr) {
        finish();
        return;
    }
    TRITONSERVER_Error* error = TRITONSERVER_ErrorNew(code, text);
    log_error(TRITONBACKEND_ResponseSend(response, TRITONSERVER_RESPONSE_COMPLETE_FINAL, error));
    TRITONSERVER_ErrorDelete(error);
    log_error(TRITONBACKEND_ResponseFactoryDelete(std::exchange(factory_, nullptr)));
}

}  // namespace token2wav
