-- Runs after ext_authz and acts only when the picker did not answer: names the cluster from the body.
-- Exactly one "model" key with one plain string, or 503: what this pattern cannot read, it must not guess.
local function refuse(handle)
  handle:respond(
    {[":status"] = "503"},
    "The gateway cannot choose an engine for this request right now. Please try again."
  )
end

function envoy_on_request(handle)
  if handle:headers():get("x-envoy-auth-failure-mode-allowed") == nil then return end
  local body = handle:body()
  if body == nil then return refuse(handle) end
  local text = body:getBytes(0, body:length())
  local _, keys = string.gsub(text, '"model"%s*:', "")
  local name = string.match(text, '"model"%s*:%s*"([%w%._:/-]+)"')
  if keys ~= 1 or name == nil or #name > 320 then return refuse(handle) end
  handle:headers():replace("x-plimsoll-cluster", "model/" .. name)
  handle:clearRouteCache()
end
