#!/usr/bin/env bash
# Installs a build to a folder of its own, moves that folder, and uses what lies there: the command, the library through
# pkg-config (shared and static) and through find_package (shared and static, C and C++); libapa_dist likewise, where it was
# built. Headers of libraries that were not built are not there.
#   test_install.sh BUILD_DIR SOURCE_DIR CC CXX
set -euo pipefail

build=$1 source=$2 cc=$3 cxx=$4
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
prefix=$folder/moved

cmake --install "$build" --prefix "$folder/first" >/dev/null
mv "$folder/first" "$prefix"

# No file of the package may name the place where it was built or first installed.
if grep -rlE "$build|$folder|$source" "$prefix" --include='*.pc' --include='*.cmake' --include='*.h'; then
    echo "names a path of this machine"
    exit 1
fi

has() { [ -e "$prefix/include/apa/$1" ]; }
built() { find "$prefix" -name "$1" | grep . >/dev/null; }
has cuda.h # in every build: its functions answer UNSUPPORTED
for pair in dist.h:libapa_dist.a dist_nccl.h:libapa_dist_nccl.a; do
    if has "${pair%:*}" && ! built "${pair#*:}"; then echo "${pair%:*} without ${pair#*:}"; exit 1; fi
    if built "${pair#*:}" && ! has "${pair%:*}"; then echo "${pair#*:} without ${pair%:*}"; exit 1; fi
done
echo "ok headers"

"$prefix"/bin/apa info >"$folder/info"
grep -q reference "$folder/info"
echo "ok command"

libdir=$(dirname "$(find "$prefix" -name apa.pc)")/..
export PKG_CONFIG_PATH=$libdir/pkgconfig
version=$(sed -n 's/.*APA_VERSION_STRING "\(.*\)".*/\1/p' "$source/include/apa/version.h")
[ "$(pkg-config --modversion apa)" = "$version" ]

# shellcheck disable=SC2046 # flags are words
"$cc" -std=c11 "$source/examples/first.c" $(pkg-config --cflags --libs apa) -lm -o "$folder/shared"
LD_LIBRARY_PATH=$libdir "$folder/shared"
LD_LIBRARY_PATH=$libdir ldd "$folder/shared" | grep libapa.so.0 >/dev/null # -q would leave early: SIGPIPE, and pipefail fails
echo "ok pkg-config, shared"

# shellcheck disable=SC2046
"$cc" -std=c11 "$source/examples/first.c" $(pkg-config --cflags --static --libs apa | sed 's/-lapa\>/-l:libapa.a/') -o "$folder/static"
"$folder/static"
if ldd "$folder/static" | grep libapa; then exit 1; fi
echo "ok pkg-config, static"

mkdir "$folder/consumer"
cp "$source/examples/first.c" "$folder/consumer/first.c"
cat >"$folder/consumer/second.cpp" <<'END'
#include <apa/apa.h>
#include <apa/eval.h>
#include <apa/io.h>
int main() { return apa_version_number() == APA_VERSION_MAJOR * 10000 + APA_VERSION_MINOR * 100 + APA_VERSION_PATCH ? 0 : 1; }
END
cat >"$folder/consumer/CMakeLists.txt" <<END
cmake_minimum_required(VERSION 3.25)
project(consumer LANGUAGES C CXX)
find_package(apa $version REQUIRED)
foreach(kind static shared)
  add_executable(first_\${kind} first.c)
  target_link_libraries(first_\${kind} PRIVATE apa::\${kind} m)
  add_executable(second_\${kind} second.cpp)
  target_link_libraries(second_\${kind} PRIVATE apa::\${kind})
endforeach()
END
cmake -S "$folder/consumer" -B "$folder/consumer/build" -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_C_COMPILER="$cc" \
    -DCMAKE_CXX_COMPILER="$cxx" >/dev/null
cmake --build "$folder/consumer/build" >/dev/null
for program in first_static first_shared second_static second_shared; do
    "$folder/consumer/build/$program"
    echo "ok find_package, $program"
done

if ! has dist.h; then
    echo "no libapa_dist in this build"
    exit 0
fi
command -v mpicc >/dev/null || { echo "no mpicc: libapa_dist not tried"; exit 0; }
mkdir "$folder/ranks"
cat >"$folder/ranks/third.c" <<'END'
#include <apa/dist.h>
int main(void) /* what needs no other rank, so no MPI that runs */
{
    apa_dist_options options;
    apa_dist_options_init(&options);
    const apa_dist_shard half = apa_dist_split_blocks(128, 2, 1, 64);
    return options.size == sizeof options && apa_dist_shard_rows(&half) == 64 ? 0 : 1;
}
END
[ "$(pkg-config --modversion apa-dist)" = "$version" ]
# shellcheck disable=SC2046
OMPI_CC=$cc MPICH_CC=$cc mpicc -std=c11 "$folder/ranks/third.c" $(pkg-config --cflags --libs apa-dist) -o "$folder/third"
LD_LIBRARY_PATH=$libdir "$folder/third"
LD_LIBRARY_PATH=$libdir ldd "$folder/third" | grep libapa_dist.so.0 >/dev/null
echo "ok pkg-config, apa-dist"

cat >"$folder/ranks/CMakeLists.txt" <<END
cmake_minimum_required(VERSION 3.25)
project(ranks LANGUAGES C)
find_package(apa $version REQUIRED COMPONENTS dist)
foreach(kind dist dist_static)
  add_executable(third_\${kind} third.c)
  target_link_libraries(third_\${kind} PRIVATE apa::\${kind})
endforeach()
END
cmake -S "$folder/ranks" -B "$folder/ranks/build" -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_C_COMPILER="$cc" >/dev/null
cmake --build "$folder/ranks/build" >/dev/null
for program in third_dist third_dist_static; do
    "$folder/ranks/build/$program"
    echo "ok find_package, $program"
done
