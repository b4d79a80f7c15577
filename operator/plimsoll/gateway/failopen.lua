-- Runs after ext_authz and acts only if the picker did not respond: sets the cluster from the model in the body.
-- Requires exactly one "model" key with a plain string, else 503: this pattern must not guess what it cannot parse.
local function reject(handle)
  handle:respond(
    {[":status"] = "503"},
    "The gateway cannot choose an engine for this request. Try again in 1 s."
  )
end

function envoy_on_request(handle)
  if handle:headers():get("x-envoy-auth-failure-mode-allowed") == nil then return end
  local body = handle:body()
  if body == nil then return reject(handle) end
  local text = body:getBytes(0, body:length())
  local _, keys = string.gsub(text, '"model"%s*:', "")
  local name = string.match(text, '"model"%s*:%s*"([%w%._:/-]+)"')
  if keys ~= 1 or name == nil or #name > 320 then return reject(handle) end
  handle:headers():replace("x-plimsoll-cluster", "model/" .. name)
  handle:clearRouteCache()
end
