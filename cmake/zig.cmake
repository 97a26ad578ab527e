# Builds the library for any machine and any glibc from 2.28 on, whatever this one has: zig's C++ compiler, which PyPI has
# as `ziglang`. Its libc++ is linked in, so that the library needs libc alone.
#   -DCMAKE_TOOLCHAIN_FILE=cmake/zig.cmake -DJAX_BWGEMM_ZIG=<zig> -DJAX_BWGEMM_MACHINE=<x86_64 or aarch64>
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES JAX_BWGEMM_ZIG JAX_BWGEMM_MACHINE)
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR "${JAX_BWGEMM_MACHINE}")
set(CMAKE_CXX_COMPILER "${JAX_BWGEMM_ZIG}" c++ -target "${JAX_BWGEMM_MACHINE}-linux-gnu.2.28")
set(CMAKE_SHARED_LINKER_FLAGS_INIT "-s")
