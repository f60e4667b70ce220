# libapa_dist: keys on several ranks, over MPI. Nobody without MPI pays for it.
#
#   APA_MPI=AUTO   built where there is an MPI (the default)
#   APA_MPI=ON     an error where there is none
#   APA_MPI=OFF    left out
# Programs: apa-mpi, the commands run and bench under mpirun (docs/distributed.md).
set(APA_MPI AUTO CACHE STRING "libapa_dist over MPI: AUTO, ON, OFF")
set_property(CACHE APA_MPI PROPERTY STRINGS AUTO ON OFF)

set(apa_mpi_on OFF)
if(NOT APA_MPI STREQUAL "OFF" AND NOT CMAKE_CROSSCOMPILING)
  find_package(MPI COMPONENTS C)
  if(MPI_C_FOUND)
    set(apa_mpi_on ON)
  elseif(APA_MPI STREQUAL "ON")
    message(FATAL_ERROR "APA_MPI=ON: no MPI found (Debian: libopenmpi-dev, openmpi-bin)")
  endif()
endif()
if(NOT apa_mpi_on)
  message(STATUS "libapa_dist, apa-mpi: left out (APA_MPI=${APA_MPI}, no MPI)")
  return()
endif()
message(STATUS "libapa_dist, apa-mpi: MPI ${MPI_C_VERSION}, ${MPIEXEC_EXECUTABLE}")

find_package(Threads REQUIRED)
file(GLOB apa_dist_sources CONFIGURE_DEPENDS src/dist/*.c)
add_library(apa_dist_objects OBJECT ${apa_dist_sources})
target_include_directories(apa_dist_objects PUBLIC include PRIVATE src)
target_link_libraries(apa_dist_objects PUBLIC MPI::MPI_C Threads::Threads)
add_library(apa_dist_static STATIC $<TARGET_OBJECTS:apa_dist_objects>)
add_library(apa_dist_shared SHARED $<TARGET_OBJECTS:apa_dist_objects>)
foreach(kind static shared)
  set_target_properties(apa_dist_${kind} PROPERTIES OUTPUT_NAME apa_dist)
  target_include_directories(apa_dist_${kind} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>)
  target_link_libraries(apa_dist_${kind} PUBLIC apa_${kind} MPI::MPI_C Threads::Threads m)
endforeach()
set_target_properties(apa_dist_shared PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR})

# apa-mpi: the same options, inputs and reports as the command's, linked from its own files.
file(GLOB apa_mpi_sources CONFIGURE_DEPENDS cli/dist/*.c)
file(GLOB apa_mpi_shared CONFIGURE_DEPENDS cli/common.c cli/inputs.c cli/machine.c cli/options.c cli/report.c cli/scores.c
     cli/synthetic.c)
add_executable(apa_mpi_command ${apa_mpi_sources} ${apa_mpi_shared})
set_target_properties(apa_mpi_command PROPERTIES OUTPUT_NAME apa-mpi)
target_include_directories(apa_mpi_command PRIVATE cli)
target_link_libraries(apa_mpi_command PRIVATE apa_dist_static PkgConfig::JANSSON)
install(TARGETS apa_mpi_command RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(TARGETS apa_dist_static apa_dist_shared ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
