-- Keeps the generated tokens that a response reports in `usage`, for the access log. Only the end of the response is
-- looked at: `usage` follows the text in JSON and in streams. Text cannot forge it, because JSON escapes its quotes.
local TAIL_BYTES = 2048

function envoy_on_response(handle)
  if handle:headers():get(":status") ~= "200" then return end
  local tail = ""
  for chunk in handle:bodyChunks() do
    local size = chunk:length()
    if size >= TAIL_BYTES then
      tail = chunk:getBytes(size - TAIL_BYTES, TAIL_BYTES)
    elseif size > 0 then
      tail = string.sub(tail .. chunk:getBytes(0, size), -TAIL_BYTES)
    end
  end
  local tokens
  for _, name in ipairs({"completion_tokens", "output_tokens"}) do
    for found in string.gmatch(tail, '[{,]%s*"' .. name .. '"%s*:%s*(%d+)%s*[,}]') do tokens = found end
  end
  if tokens ~= nil and #tokens <= 9 then
    handle:streamInfo():dynamicMetadata():set("plimsoll", "output_tokens", tonumber(tokens))
  end
end
