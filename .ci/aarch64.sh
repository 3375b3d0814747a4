# Sourced after packages.sh: Debian's compiler with its arm64 standard library, for rustup's cargo to use through RUSTC and RUSTDOC. Both
# are unpacked into the cache and not installed, so that no other Rust on the machine is touched.

aarch64=aarch64-unknown-linux-gnu
toolchain=$cache/rust-aarch64

install gcc libc6-dev gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user
if [ ! -e "$toolchain/complete" ]; then
  rm -rf "$toolchain"
  mkdir -p "$toolchain"
  update_lists
  show() { apt-cache -o APT::Architectures=amd64,arm64 show --no-all-versions "$1"; }
  std=$(show libstd-rust-web-dev | grep -o 'libstd-rust-web-[0-9.]*[0-9]' | head -1)
  llvm=$(show "$std" | grep -o 'libllvm[0-9]*' | head -1)
  downloads=$(mktemp -d)
  (cd "$downloads" && apt_get download rustc-web "$std" libstd-rust-web-dev libstd-rust-web-dev:arm64)
  versions=$(ls "$downloads" | sed -n 's/^libstd-rust-web-dev_\([^_]*\)_.*/\1/p' | sort -u)
  [ "$(wc -l <<<"$versions")" = 1 ] || { echo "the two standard libraries differ: $versions" >&2; exit 1; }
  for package in "$downloads"/*.deb; do dpkg -x "$package" "$toolchain"; done
  rm -rf "$downloads"
  echo "$llvm" >"$toolchain/complete"
fi
install "$(<"$toolchain/complete")"
for tool in rustc rustdoc; do
  printf '#!/bin/sh\nexport LD_LIBRARY_PATH=%s${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}\nexec %s "$@"\n' \
    "$toolchain/usr/lib/x86_64-linux-gnu" "$toolchain/usr/bin/$tool" >"$toolchain/$tool"
  chmod +x "$toolchain/$tool"
done
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
