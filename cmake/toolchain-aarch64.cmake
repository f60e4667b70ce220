# Cross build for 64-bit ARM with Debian's compiler; tests run under qemu-user. scripts/test-aarch64.sh is the way in.
#
# APA_AARCH64_ROOT: a folder with the arm64 development packages of the dependencies unpacked in it (usr/include, usr/lib/…).
# The C library comes with the cross compiler.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)

set(APA_AARCH64_ROOT "" CACHE PATH "Folder with the unpacked arm64 packages")
set(APA_AARCH64_CPU "neoverse-n1" CACHE STRING "What qemu-user pretends to be")
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES APA_AARCH64_ROOT APA_AARCH64_CPU)

set(CMAKE_FIND_ROOT_PATH ${APA_AARCH64_ROOT} /usr/aarch64-linux-gnu)
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
set(ENV{PKG_CONFIG_LIBDIR} ${APA_AARCH64_ROOT}/usr/lib/aarch64-linux-gnu/pkgconfig)
set(ENV{PKG_CONFIG_SYSROOT_DIR} ${APA_AARCH64_ROOT})
set(CMAKE_C_FLAGS_INIT "-isystem ${APA_AARCH64_ROOT}/usr/include")
foreach(kind EXE SHARED)
  set(CMAKE_${kind}_LINKER_FLAGS_INIT "-Wl,-rpath-link,${APA_AARCH64_ROOT}/usr/lib/aarch64-linux-gnu:${APA_AARCH64_ROOT}/lib/aarch64-linux-gnu")
endforeach()

set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -cpu ${APA_AARCH64_CPU} -L /usr/aarch64-linux-gnu
    -E LD_LIBRARY_PATH=${APA_AARCH64_ROOT}/usr/lib/aarch64-linux-gnu:${APA_AARCH64_ROOT}/lib/aarch64-linux-gnu)
