// Triton's interface in C++: errors as exceptions, and the owner of the responses to a request.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "frames.h"
#include "triton_api.h"

namespace token2wav {

// An error that the client of a request gets.
class Refusal : public std::runtime_error {
public:
    Refusal(TRITONSERVER_Error_Code code, const std::string& text)
        : std::runtime_error(text), code(code) {}

    TRITONSERVER_Error_Code code;
};

// Throws Refusal with the text of an error of Triton, which it deletes; nothing for nullptr.
void check(TRITONSERVER_Error* error);

// Logs an error of Triton in a place where no client can get it, and deletes it; nothing for nullptr.
void log_error(TRITONSERVER_Error* error);

// Writes a line to the log of the server.
void log(TRITONSERVER_LogLevel level, const std::string& text, int line = __builtin_LINE());

// The responses to one request of Triton, which may be released before they are sent.
//
// One thread at a time may use it. It ends with `finish` or `fail`, and is not used afterwards:
// Triton must not be asked about a request that has had its final response.
class Reply {
public:
    explicit Reply(TRITONBACKEND_Request* request);
    Reply(Reply&& other) noexcept;
    Reply& operator=(Reply&& other) = delete;
    ~Reply();

    // True if the client has cancelled the request, or has gone.
    bool is_cancelled() const;

    // Sends a response with one buffer for each output. If Triton does not take an output, the reply
    // fails with the reason. Returns whether it goes on.
    bool send(const std::vector<Tensor>& outputs);

    void finish();
    void fail(TRITONSERVER_Error_Code code, const std::string& text);

private:
    void fail(TRITONBACKEND_Response* response, TRITONSERVER_Error_Code code, const char* text);

    TRITONBACKEND_ResponseFactory* factory_ = nullptr;
};

}  // namespace token2wav
