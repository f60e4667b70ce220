# The CUDA engine: kernels by nvcc, host side by the C compiler, one switch.
#
#   APA_CUDA=OFF   left out; apa/cuda.h says so at run time
#   APA_CUDA=ON    an error when there is no nvcc
#   APA_CUDA=AUTO  ON where there is an nvcc
# APA_CUDA_ARCHS lists what machine code is made for, as nvcc names it; NN-virtual: PTX alone, which the driver compiles.
set(APA_CUDA OFF CACHE STRING "CUDA engine: OFF, ON, AUTO")
set(APA_CUDA_ARCHS "80;86;89;90;120a" CACHE STRING "CUDA architectures")
set_property(CACHE APA_CUDA PROPERTY STRINGS OFF ON AUTO)

# With an nvcc the kernels are compiled by a test even where the engine is left out.
find_program(APA_NVCC nvcc HINTS $ENV{CUDA_HOME}/bin /usr/local/cuda/bin)
if(APA_TESTS AND APA_NVCC AND CMAKE_C_COMPILER_ID STREQUAL GNU AND NOT APA_SANITIZE) # once is enough in CI
  enable_testing()
  add_test(NAME cuda_kernels COMMAND bash ${PROJECT_SOURCE_DIR}/tests/cuda/check_kernels.sh ${PROJECT_SOURCE_DIR} ${APA_NVCC}
           80 89 90 120a)
  set_tests_properties(cuda_kernels PROPERTIES TIMEOUT 900)
  find_program(APA_TEST_CXX NAMES g++ c++ clang++)
  if(APA_TEST_CXX)
    add_test(NAME cuda_on_cpu COMMAND bash ${PROJECT_SOURCE_DIR}/tests/cuda/on_cpu.sh ${PROJECT_SOURCE_DIR} ${APA_NVCC} ${APA_TEST_CXX})
    set_tests_properties(cuda_on_cpu PROPERTIES TIMEOUT 600 SKIP_RETURN_CODE 77)
  endif()
endif()

set(apa_cuda_on OFF)
set(apa_pc_cuda "") # for apa.pc: what the static library needs beside the rest
if(NOT APA_CUDA STREQUAL "OFF")
  if(APA_NVCC)
    get_filename_component(apa_cuda_root ${APA_NVCC} REALPATH)
    get_filename_component(apa_cuda_root ${apa_cuda_root}/../.. ABSOLUTE)
    find_library(APA_CUDART NAMES cudart_static HINTS ${apa_cuda_root}
                 PATH_SUFFIXES lib64 lib targets/x86_64-linux/lib targets/sbsa-linux/lib)
    find_path(APA_CUDA_INCLUDE cuda_runtime_api.h HINTS ${apa_cuda_root}
              PATH_SUFFIXES include targets/x86_64-linux/include targets/sbsa-linux/include)
  endif()
  if(APA_NVCC AND APA_CUDART AND APA_CUDA_INCLUDE)
    set(apa_cuda_on ON)
  elseif(APA_CUDA STREQUAL "ON")
    message(FATAL_ERROR "APA_CUDA=ON: nvcc, cudart_static or cuda_runtime_api.h not found")
  endif()
endif()

if(NOT apa_cuda_on)
  message(STATUS "CUDA engine: left out (APA_CUDA=${APA_CUDA})")
  target_sources(apa_objects PRIVATE src/cuda/absent/absent.c src/cuda/accept.c src/cuda/trait.c) # what is refused is tested everywhere
  return()
endif()

message(STATUS "CUDA engine: ${APA_NVCC}, architectures ${APA_CUDA_ARCHS}")
file(GLOB apa_cuda_c CONFIGURE_DEPENDS src/cuda/*.c src/cuda/wgmma/*.c)
file(GLOB apa_cuda_kernels CONFIGURE_DEPENDS src/cuda/*.cu src/cuda/warp_mma/*.cu src/cuda/wgmma/*.cu)
file(GLOB apa_cuda_headers CONFIGURE_DEPENDS src/cuda/*.h src/cuda/*.cuh src/cuda/warp_mma/*.cuh src/cuda/wgmma/*.h src/cuda/wgmma/*.cuh include/apa/tensor.h)
target_sources(apa_objects PRIVATE ${apa_cuda_c})
target_compile_definitions(apa_objects PRIVATE APA_HAVE_CUDA=1)
target_include_directories(apa_objects SYSTEM PRIVATE ${APA_CUDA_INCLUDE})

set(apa_cuda_flags -std=c++17 -O3 -lineinfo -Werror all-warnings -Xcompiler -Wall,-Wextra,-fPIC,-fvisibility=hidden,-fno-exceptions,-fno-threadsafe-statics
    -I${PROJECT_SOURCE_DIR}/include -I${PROJECT_SOURCE_DIR}/src)
set(apa_cuda_archs_warp_mma "")
foreach(arch ${APA_CUDA_ARCHS})
  if(arch MATCHES "^(.*)-virtual$")
    list(APPEND apa_cuda_archs_warp_mma -gencode arch=compute_${CMAKE_MATCH_1},code=compute_${CMAKE_MATCH_1})
  else()
    list(APPEND apa_cuda_archs_warp_mma -gencode arch=compute_${arch},code=sm_${arch})
  endif()
endforeach()
set(apa_cuda_archs_cuda ${apa_cuda_archs_warp_mma}) # what all families share
set(apa_cuda_archs_wgmma -gencode arch=compute_90a,code=sm_90a) # these instructions are of this device alone
set(apa_cuda_objects "")
foreach(source ${apa_cuda_kernels})
  get_filename_component(name ${source} NAME_WE)
  get_filename_component(family ${source} DIRECTORY)
  get_filename_component(family ${family} NAME)
  set(object ${CMAKE_BINARY_DIR}/cuda/${family}_${name}.o)
  add_custom_command(OUTPUT ${object}
    COMMAND ${CMAKE_COMMAND} -E make_directory ${CMAKE_BINARY_DIR}/cuda
    COMMAND ${APA_NVCC} ${apa_cuda_flags} ${apa_cuda_archs_${family}} -c ${source} -o ${object}
    DEPENDS ${source} ${apa_cuda_headers} COMMENT "nvcc ${name}.cu" VERBATIM)
  list(APPEND apa_cuda_objects ${object})
endforeach()
set_source_files_properties(${apa_cuda_objects} PROPERTIES EXTERNAL_OBJECT TRUE GENERATED TRUE)
add_custom_target(apa_cuda_kernels DEPENDS ${apa_cuda_objects})

foreach(target apa_static apa_shared)
  add_dependencies(${target} apa_cuda_kernels)
  target_sources(${target} PRIVATE ${apa_cuda_objects})
endforeach()
set(apa_pc_cuda " ${APA_CUDART} -ldl -lrt")
target_link_libraries(apa_static PUBLIC ${APA_CUDART} ${CMAKE_DL_LIBS} rt pthread)
target_link_libraries(apa_shared PRIVATE ${APA_CUDART} ${CMAKE_DL_LIBS} rt pthread)

# tests/cuda/verify.c needs a device: a program to be run by hand, no test.
if(APA_TESTS)
  set(fragments ${CMAKE_BINARY_DIR}/cuda/test_fragments.o)
  add_custom_command(OUTPUT ${fragments}
    COMMAND ${APA_NVCC} ${apa_cuda_flags} ${apa_cuda_archs_warp_mma} -I${PROJECT_SOURCE_DIR} -c
            ${PROJECT_SOURCE_DIR}/tests/cuda/fragments.cu -o ${fragments}
    DEPENDS tests/cuda/fragments.cu tests/cuda/verify.h ${apa_cuda_headers} COMMENT "nvcc fragments.cu" VERBATIM)
  set_source_files_properties(${fragments} PROPERTIES EXTERNAL_OBJECT TRUE GENERATED TRUE)
  add_executable(apa_cuda_verify tests/cuda/verify.c tests/cuda/verify_device.c tests/cuda/verify_kept.c tests/cuda/verify_windowed.c tests/cuda/on_device.c tests/cuda/codes.c cli/synthetic.c ${fragments})
  set_target_properties(apa_cuda_verify PROPERTIES OUTPUT_NAME cuda_verify)
  target_include_directories(apa_cuda_verify PRIVATE src .)
  target_include_directories(apa_cuda_verify SYSTEM PRIVATE ${APA_CUDA_INCLUDE})
  target_link_libraries(apa_cuda_verify PRIVATE apa_static PkgConfig::JANSSON)

  # What racecheck says of rings of bulk copies in general: to be run by hand too.
  add_custom_command(OUTPUT ${CMAKE_BINARY_DIR}/cuda_race
    COMMAND ${APA_NVCC} ${apa_cuda_flags} -gencode arch=compute_90,code=sm_90 ${PROJECT_SOURCE_DIR}/tests/cuda/race.cu -o ${CMAKE_BINARY_DIR}/cuda_race
    DEPENDS tests/cuda/race.cu src/cuda/ptx.cuh COMMENT "nvcc race.cu" VERBATIM)
  add_custom_target(apa_cuda_race ALL DEPENDS ${CMAKE_BINARY_DIR}/cuda_race)

  # What the host side would launch, with the launchers caught: needs no device.
  add_executable(test_cuda_plan tests/cuda/plan.c tests/cuda/calls.c)
  target_include_directories(test_cuda_plan SYSTEM PRIVATE ${APA_CUDA_INCLUDE})
  target_link_libraries(test_cuda_plan PRIVATE apa_test_support)
  target_link_options(test_cuda_plan PRIVATE -Wl,--wrap=apa_cuda_current,--wrap=apa_wgmma_make_maps,--wrap=apa_cuda_launch_gather,--wrap=cudaPointerGetAttributes)
  foreach(step exact prep_keys prep_queries cold judge fix hot both recheck finish)
    target_link_options(test_cuda_plan PRIVATE -Wl,--wrap=apa_cuda_launch_${step},--wrap=apa_wgmma_launch_${step})
  endforeach()
  add_test(NAME test_cuda_plan COMMAND test_cuda_plan)
  set_tests_properties(test_cuda_plan PROPERTIES TIMEOUT 900 LABELS unit)
endif()
