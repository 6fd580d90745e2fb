-- renew.lua: renews leases of one concurrency limit of one identity. A lease
-- that is missing, because Redis lost its data, is put back.
--
-- KEYS[1]   <prefix><pool>:{<identity>}:c:<limit>   sorted set of leases, score = end in us
-- ARGV[1] deadline   us of server time; from then on nothing is written
-- ARGV[2] lease      us, at most an hour
-- followed by the leases, all of this length
-- Returns integers:
--   reply[1] now     us; alone if the deadline has passed
--   reply[2] renewed how many leases
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2] -- us
if now >= tonumber(ARGV[1]) then return {now} end

local lease = tonumber(ARGV[2]) -- us
local ends = {}
for i = 3, #ARGV do
  ends[#ends + 1] = now + lease
  ends[#ends + 1] = ARGV[i]
end
redis.call('ZADD', KEYS[1], unpack(ends))
redis.call('PEXPIRE', KEYS[1], 3600002) -- after the longest lease of all
return {now, #ARGV - 2}
