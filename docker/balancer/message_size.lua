-- Limits the size of a gRPC message before any part of the message is forwarded. Triton itself accepts 2 GB, and stores
-- the whole message in memory.
--
-- A gRPC body is a sequence of messages. Five bytes precede each message: a flag and the length (big-endian). This filter
-- reads these bytes, and ends a stream in which a message announces more than TOKEN2WAV_MESSAGE_BYTES.

local limit = tonumber(os.getenv("TOKEN2WAV_MESSAGE_BYTES"))

local MessageSize = {}
MessageSize.id = "message_size"
MessageSize.flags = filter.FLT_CFG_FL_HTX
MessageSize.__index = MessageSize

function MessageSize:new()
    return setmetatable({ left = 0, prefix = "" }, MessageSize)
end

function MessageSize:start_analyze(txn, channel)
    if not channel:is_resp() then
        filter.register_data_filter(self, channel)
    end
end

function MessageSize:http_payload(txn, message)
    local data = message:body()
    if not data then
        return
    end
    local at = 1
    while at <= #data do
        if self.left > 0 then
            local step = math.min(self.left, #data - at + 1)
            self.left = self.left - step
            at = at + step
        else
            local step = math.min(5 - #self.prefix, #data - at + 1)
            self.prefix = self.prefix .. data:sub(at, at + step - 1)
            at = at + step
            if #self.prefix == 5 then
                self.left = string.unpack(">I4", self.prefix, 2)
                self.prefix = ""
                if self.left > limit then
                    -- The way for a filter to end a stream: clients are told 400.
                    error("message of " .. self.left .. " bytes refused, limit " .. limit)
                end
            end
        end
    end
end

core.register_filter("message_size", MessageSize, function(filter, arguments)
    return filter
end)
