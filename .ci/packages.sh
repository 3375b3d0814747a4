# Sourced by the scripts beside it: Debian packages, and one folder for everything downloaded or built from them.

# Outside the checkout, so that it survives a fresh clone; reused whenever present, safe to delete.
cache=${FUSED_ATTENTION_CI_CACHE:-$HOME/.cache/fused-attention-ci}
mkdir -p "$cache/packages/partial"
export DEBIAN_FRONTEND=noninteractive

# apt_get ARGUMENTS... : as apt-get, with its archives in the cache and the arm64 package lists known beside the machine's own
# (to apt alone: dpkg's architectures stay as they are). One at a time.
apt_get() {
  flock -o "$cache/apt.lock" apt-get -qq -o Dir::Cache::Archives="$cache/packages" -o APT::Keep-Downloaded-Packages=true \
    -o APT::Sandbox::User=root -o APT::Architectures=amd64,arm64 "$@"
}

# Once per run of CI: what the lists say must not change between the two halves of a toolchain.
update_lists() {
  [ -n "${FUSED_ATTENTION_CI_LISTS_UPDATED:-}" ] || apt_get update
  export FUSED_ATTENTION_CI_LISTS_UPDATED=1
}

# install PACKAGE... : installs those that are missing.
install() {
  local package missing=()
  for package in "$@"; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
  done
  [ ${#missing[@]} -eq 0 ] && return
  update_lists
  apt_get install -y --no-install-recommends "${missing[@]}" >/dev/null
}
